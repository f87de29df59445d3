"""Paces prefill: limits the prompt tokens of a step, so that decoding requests do not wait long for them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.speculation.learned_curve import LearnedCurve
from cluster.speculation.line_fit import LineFit

_LEAST_TOKENS = 16  # minimum of prompt tokens in a step, so that prompts make progress
_FIRST_TOKENS = 64  # limit of prompt tokens before the first measurement; then twice the largest measured number
ALONE_FACTOR = 4  # a lone prompt may take this many times the set time: long steps are cheaper, and nothing else waits
_TELLING_SHARE = 0.2  # prompts that add less than this share of the set time mostly measure the fixed cost of a chunk
_KEPT_SHARE = 0.99  # decay per step of the weight of earlier steps in the fit


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Tokens of one prompt, and the number of tokens before them."""

    num_tokens: int
    num_before: int


class PromptPace:
    """Learns the time that prompt tokens add to a step, and limits their number to a set time."""

    def __init__(self, max_seconds: float | None, max_rows: int, first_token_limit: float = math.inf) -> None:
        """`max_seconds`: time that prompts may add to a step; None: unlimited. `max_rows`: maximum rows of a step.

        `first_token_limit`: seconds in which waiting prompts should have their first tokens.
        """
        self.spare_seconds = math.inf  # what running answers with limits leave of a step; may lower `max_seconds`
        self._max_seconds = max_seconds
        self._first_token_limit = first_token_limit
        self._plain = LearnedCurve(max_rows)  # times of steps without prompts
        self._cost = _TokenCost()
        self._most_tokens = _FIRST_TOKENS

    def know(self, times: Iterable[tuple[int, float]]) -> None:
        """Learns from steps that were timed before the first request. `times`: rows and seconds of each step."""
        for num_rows, seconds in times:
            self._plain.observe(num_rows, seconds)
            self._learn([PromptPart(num_rows, 0)], seconds)

    def observe(self, num_rows: int, parts: Sequence[PromptPart], seconds: float) -> None:
        """Records a step of `num_rows` rows, including those of `parts`, that took `seconds`."""
        if parts:
            num_others = num_rows - sum(part.num_tokens for part in parts)
            plain = self._plain.seconds(num_others) if num_others and self._plain.is_known else 0.0
            self._learn(parts, max(seconds - plain, 0.0))
        else:
            self._plain.observe(num_rows, seconds)

    def _learn(self, parts: Sequence[PromptPart], added_seconds: float) -> None:
        if self._max_seconds is None:
            return
        num_tokens = sum(part.num_tokens for part in parts)
        before = sum(part.num_tokens * (part.num_before + part.num_tokens / 2) for part in parts) / num_tokens
        self._most_tokens = max(2 * num_tokens, self._most_tokens)
        is_telling = added_seconds > _TELLING_SHARE * self._max_seconds
        self._cost.observe(before, added_seconds / num_tokens, is_telling=is_telling)

    def budget(self, *, is_alone: bool, prompts: Iterable[PromptPart] = (), num_rows: int = 0) -> float:
        """Returns the seconds that `prompts` may add to a step of `num_rows` other rows.

        `is_alone`: the step has only one prompt and nothing else. Answers with limits leave `spare_seconds`, but
        prompts get at least what their own limit needs, up to the set time.
        """
        if self._max_seconds is None:
            return math.inf
        if is_alone:
            return self._max_seconds * ALONE_FACTOR
        if self.spare_seconds >= self._max_seconds:  # the usual case
            return self._max_seconds
        return min(self._max_seconds, max(self.spare_seconds, self._needed_seconds(prompts, num_rows)))

    def _needed_seconds(self, prompts: Iterable[PromptPart], num_rows: int) -> float:
        """Returns the seconds of prompts in each step that complete all `prompts` in half of the limit.

        The other half is for the wait before the first step, and for prompts that come later. At least a microsecond,
        the smallest time that `share` divides.
        """
        all_seconds, half = self.seconds(prompts), self._first_token_limit / 2
        if all_seconds >= half:
            return math.inf
        plain = self._plain.seconds(num_rows) if num_rows and self._plain.is_known else 0.0
        return max(1e-6, plain * all_seconds / (half - all_seconds))

    def share(self, prompts: Sequence[PromptPart], num_tokens: int, seconds: float) -> list[int]:
        """Returns the number of tokens of each of `prompts` that a step computes.

        `prompts` are the uncomputed parts, the oldest first. The result is at most `num_tokens` tokens in total, which
        add about `seconds` to the step. The function `share` divides this time among the prompts.
        """
        lengths = [prompt.num_tokens for prompt in prompts]
        if math.isinf(seconds) or not prompts:
            return share(lengths, num_tokens)
        if seconds <= 0:
            return [0] * len(prompts)
        if self._cost.is_known:
            whole = [math.ceil(1e6 * self._cost.of(prompt)) for prompt in prompts]  # microseconds
            parts = share(whole, math.floor(1e6 * seconds))
            lengths = [self._cost.num_tokens(prompt, part / 1e6) for prompt, part in zip(prompts, parts, strict=True)]
            lengths[0] = max(lengths[0], min(prompts[0].num_tokens, _LEAST_TOKENS))
        return share(lengths, min(num_tokens, self._most_tokens))

    def seconds(self, parts: Iterable[PromptPart]) -> float:
        """Returns the predicted seconds that `parts` add to a step; 0 before the first measurement."""
        return sum(map(self._cost.of, parts)) if self._cost.is_known else 0.0


class _TokenCost:
    """Seconds that a prompt token adds to a step: a linear function of the number of tokens before it.

    The slope is fitted to steps with prompts; newer steps have more weight. The line is shifted to fit the newest of
    these steps. (A curve over the rows of all steps predicted 30 to 300 % too little in long prompts.)
    """

    def __init__(self) -> None:
        self._before, self._seconds = 0.0, 0.0  # preceding tokens and seconds per token of the latest step
        self._growth = 0.0  # growth of the cost per preceding token, relative to the cost without preceding tokens
        self._fit = LineFit(_KEPT_SHARE)  # of seconds per token over preceding tokens
        self.is_known = False

    def of(self, part: PromptPart) -> float:
        """Returns the seconds that `part` adds."""
        return part.num_tokens * self._of_one(part.num_before + part.num_tokens / 2)

    def num_tokens(self, part: PromptPart, seconds: float) -> int:
        """Returns the number of leading tokens of `part` that add at most `seconds`."""
        if self.of(part) <= seconds:
            return part.num_tokens
        # first n + slope n^2 / 2 = seconds
        first = self._of_one(part.num_before)
        slope = self._of_one(part.num_before + 1) - first
        return min(part.num_tokens, int(2 * seconds / (first + math.sqrt(first * first + 2 * slope * seconds))))

    def _of_one(self, before: float) -> float:
        return self._seconds * (1.0 + self._growth * before) / (1.0 + self._growth * self._before)

    def observe(self, before: float, seconds: float, *, is_telling: bool) -> None:
        """Learns from prompt tokens that added `seconds` each and had `before` tokens before them on average.

        Without `is_telling`, `seconds` is only an upper bound.
        """
        if is_telling:
            self._learn(before, seconds)
        elif self.is_known and seconds >= self._of_one(before):
            return
        self._before, self._seconds = before, seconds
        self.is_known = True

    def _learn(self, before: float, seconds: float) -> None:
        fit = self._fit
        fit.observe(before, seconds)
        if fit.variance_x > 0.0:
            slope = max(fit.covariance / fit.variance_x, 0.0)
            # Every token takes time, so a lower value of the fit is noise.
            at_start = max(fit.mean_y - slope * fit.mean_x, 0.05 * fit.mean_y)
            self._growth = slope / at_start


def share(lengths: Sequence[int], budget: int) -> list[int]:
    """Divides `budget` tokens among prompts with `lengths` uncomputed tokens, the oldest first. Returns the shares.

    Half of the budget is reserved for the oldest prompt, so that it finishes eventually. The rest goes to the shortest
    prompts first, so that as few prompts as possible wait.
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
