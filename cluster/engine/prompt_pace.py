"""How much of the prompts a step computes, so that whoever is in it does not wait for them long."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cluster.speculation.costs import LearnedCurve

_LEAST_TOKENS = 16  # in a step, however slow: prompts have to get on
_FIRST_TOKENS = 64  # before anything was measured; from then on at most twice as many as in the step before
_TELLING_SHARE = 0.2  # of the set time: where prompts add less, half of it is what a chunk costs however short it is


class PromptPace:
    """Learns what prompt tokens add to a step, and so how many of them add a set time to it.

    What a token takes grows with the tokens before it, by a few per cent from one step of a long prompt to the next:
    the newest step with prompts is the measure of the next. (A curve over all steps was 30 to 300 % behind.)
    """

    def __init__(self, max_seconds: float | None, max_rows: int) -> None:
        """`max_seconds`: what prompts may add to a step; None: whatever they take. `max_rows`: of a step."""
        self._max_seconds = max_seconds
        self._plain = LearnedCurve(max_rows)  # of steps without prompts
        self._token_seconds: float | None = None  # that a prompt token adds
        self._most_tokens = _FIRST_TOKENS

    def know(self, times: Iterable[tuple[int, float]]) -> None:
        """Steps of so many rows were tried, and took so many seconds."""
        for num_rows, seconds in times:
            self._plain.observe(num_rows, seconds)
            self._learn(num_rows, seconds)

    def observe(self, num_rows: int, num_prompt_tokens: int, seconds: float) -> None:
        """A step of `num_rows` rows, so many of them of prompts, took `seconds`."""
        if num_prompt_tokens:
            self._learn(num_prompt_tokens, seconds - self._plain_seconds(num_rows - num_prompt_tokens))
        else:
            self._plain.observe(num_rows, seconds)

    def _learn(self, num_tokens: int, added_seconds: float) -> None:
        if self._max_seconds is None:
            return
        self._most_tokens = max(2 * num_tokens, _FIRST_TOKENS)
        seconds = max(added_seconds, 0.0) / num_tokens
        if self._token_seconds is None or added_seconds > _TELLING_SHARE * self._max_seconds:
            self._token_seconds = seconds
        else:
            self._token_seconds = min(self._token_seconds, seconds)

    def num_tokens(self, num_rows: int, budget: int) -> int:
        """Prompt tokens, `budget` at most, for a step that has `num_rows` rows already."""
        if self._max_seconds is None:
            return budget
        most = min(budget, self._most_tokens)
        if self._token_seconds is not None and most * self._token_seconds > self._max_seconds:
            most = int(self._max_seconds / self._token_seconds)
        return min(budget, max(most, _LEAST_TOKENS))

    def _plain_seconds(self, num_rows: int) -> float:
        return self._plain.seconds(num_rows) if num_rows and self._plain.is_known else 0.0


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
