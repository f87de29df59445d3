"""How much of the prompts a step computes, so that whoever is in it does not wait for them long."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

from cluster.speculation.costs import LearnedCurve

_LEAST_TOKENS = 16  # in a step, however slow: prompts have to get on
_FIRST_TOKENS = 64  # before anything was measured; from then on at most twice of what was


class PromptPace:
    """Learns what a step takes over its rows, and so how many prompt tokens add a set time to it.

    What a token takes grows with the tokens before it, which the curve follows as a long prompt gets on.
    """

    def __init__(self, max_seconds: float | None, max_rows: int) -> None:
        """`max_seconds`: what prompts may add to a step; None: whatever they take. `max_rows`: of a step."""
        self._max_seconds = max_seconds
        self._seconds = LearnedCurve(max_rows)
        self._most_tokens = _FIRST_TOKENS

    def know(self, times: Iterable[tuple[int, float]]) -> None:
        """Steps of so many rows were tried, and took so many seconds."""
        for num_rows, seconds in times:
            self.observe(num_rows, num_rows, seconds)

    def observe(self, num_rows: int, num_prompt_tokens: int, seconds: float) -> None:
        """A step of `num_rows` rows, so many of them of prompts, took `seconds`."""
        self._seconds.observe(num_rows, seconds)
        self._most_tokens = max(self._most_tokens, 2 * num_prompt_tokens)

    def num_tokens(self, num_rows: int, budget: int) -> int:
        """Prompt tokens, `budget` at most, for a step that has `num_rows` rows already."""
        if self._max_seconds is None:
            return budget
        most = min(budget, self._most_tokens)
        if self._seconds.is_known:
            limit = self._seconds.seconds(num_rows) + self._max_seconds
            counts = range(num_rows + 1, num_rows + most + 1)
            most = bisect.bisect_right(counts, limit, key=self._seconds.seconds)
        return min(budget, max(most, _LEAST_TOKENS))


def share(lengths: Sequence[int], budget: int) -> list[int]:
    """How many of `budget` tokens go to each of the prompts that have so many left, the oldest first.

    The oldest has half of them for sure, so that it is done some day; the others go to the shortest first, which makes
    the fewest wait.
    """
    shares = [0] * len(lengths)
    order = sorted(range(1, len(lengths)), key=lengths.__getitem__)
    left = budget - min(lengths[0], -(-budget // 2)) if lengths else 0
    for index in order:
        shares[index] = min(lengths[index], left)
        left -= shares[index]
    if lengths:
        shares[0] = min(lengths[0], budget - sum(shares))
    return shares
