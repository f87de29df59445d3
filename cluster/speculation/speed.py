"""The speed of speculation: tokens per round over the round's time.

    E       = 1 + s_1 + ... + s_k                     tokens per round, bonus included; s_j: draft j and all before it
                                                      are accepted. With one acceptance rate a: (1 - a^(k+1)) / (1 - a)
    speedup = E * t_decode / (k * t_draft + t_verify + round trip)
    rate    = n * E / (t_step(n * (1 + k)) + wait(k))           tokens per second of n sequences with k drafts each
    best    = argmax over m of (tokens + w_1 + ... + w_m) / seconds(m)      the first m of drafts sorted by worth w

E and the speedup are equation 1 and theorem 3.8 of Leviathan, Kalman, Matias, "Fast inference from transformers via
speculative decoding", ICML 2023, with the times of the parts in place of ratios.
The controller (`depth`) computes the last formula for sequences with different numbers of drafts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cluster.speculation.step_times import StepTimes

FloatArray = npt.NDArray[np.float64]

Acceptance = float | tuple[float, ...]
"The probability that a draft is accepted if all before it are: one for all places, or one by place; the last goes on."


def expected_tokens(acceptance_rate: float, num_speculative_tokens: float) -> float:
    """Returns E of `num_speculative_tokens` drafts, each accepted independently with `acceptance_rate`."""
    _check_rate(acceptance_rate)
    if acceptance_rate == 1.0:
        return num_speculative_tokens + 1.0
    return float((1 - acceptance_rate ** (num_speculative_tokens + 1)) / (1 - acceptance_rate))


def survivals(acceptance: Acceptance, num_speculative_tokens: int) -> list[float]:
    """Returns the probabilities that the first 0, 1, ... of `num_speculative_tokens` drafts are accepted.

    Their sum is E.
    """
    rates = acceptance if isinstance(acceptance, tuple) else (acceptance,)
    found = [1.0]
    for place in range(num_speculative_tokens):
        found.append(found[-1] * rates[min(place, len(rates) - 1)])
    return found


def scaled(acceptance: Acceptance, factor: float) -> Acceptance:
    """Returns `factor` times the acceptance, at most 1."""
    if isinstance(acceptance, tuple):
        return tuple(min(1.0, rate * factor) for rate in acceptance)
    return min(1.0, acceptance * factor)


def acceptance_rate_of(tokens_a_round: float, num_speculative_tokens: float) -> float:
    """Returns the acceptance rate with which a round commits `tokens_a_round` tokens on average.

    Assumes one rate for all positions. `num_speculative_tokens` may be a mean over rounds.
    """
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if (1 - middle ** (num_speculative_tokens + 1)) / (1 - middle) < tokens_a_round:
            low = middle
        else:
            high = middle
    return low


def tokens_per_round(survival: Iterable[float]) -> float:
    """Returns E of drafts with these survival probabilities, the shallowest first."""
    return 1.0 + sum(survival)


def best_prefix(
    num_tokens: FloatArray, seconds: FloatArray, excess: FloatArray | None = None
) -> tuple[float, tuple[int, ...]]:
    """Returns the most tokens per second with the first drafts of a list, and the place of the last of these drafts.

    The list has the drafts, or groups of drafts, in order of worth. `num_tokens` [..., n]: expected committed tokens of
    the step with the drafts up to each one; other axes are alternatives. `seconds` [..., n]: its duration; infinite
    where these drafts are not allowed. `excess` [..., n]: only drafts with the least excess over limits are considered.
    """
    rates = num_tokens / np.maximum(seconds, 1e-9)
    if excess is not None:
        rates = np.where(excess <= excess.min(), rates, 0.0)
    place = tuple(int(index) for index in np.unravel_index(rates.argmax(), rates.shape))
    return float(rates[place]), place


def round_seconds(drafting: float, verify: float, round_trip: float = 0.0, *, overlaps: bool = False) -> float:
    """Returns the duration of a round, in the unit of its parts.

    `overlaps`: the target verifies while the draft drafts.
    """
    return (max(verify, drafting) if overlaps else drafting + verify) + round_trip


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """Durations of a round's parts, all in one unit. They do not depend on the number of rows."""

    draft_token: float  # the draft's time for one token
    verify: float  # the target's verify step
    round_trip: float = 0.0
    decode: float | None = None  # time of a step without drafts; None: that of the verify step
    rest: float = 0.0  # other time of a round
    plain_rest: float = 0.0  # other time of a step without drafts

    def of(self, num_speculative_tokens: int) -> float:
        """Returns the duration of a round with `num_speculative_tokens` drafts."""
        return self.rest + round_seconds(num_speculative_tokens * self.draft_token, self.verify, self.round_trip)

    def speedup(self, tokens_per_round: float, num_speculative_tokens: int) -> float:
        """Returns the ratio of tokens per second with drafts to tokens per second without."""
        plain = (self.verify if self.decode is None else self.decode) + self.plain_rest
        return tokens_per_round * plain / self.of(num_speculative_tokens)


def speedup(acceptance_rate: float, num_speculative_tokens: int, costs: RoundCosts) -> float:
    """Returns the ratio of tokens per second with drafts to those without, with one rate for all positions."""
    return costs.speedup(expected_tokens(acceptance_rate, num_speculative_tokens), num_speculative_tokens)


def best_num_speculative_tokens(acceptance_rate: float, costs: RoundCosts, maximum: int = 64) -> int:
    """Returns the k in 0 .. maximum with the largest speedup; 0 is plain decoding, without a round trip."""
    best, best_speedup = 0, 1.0
    for k in range(1, maximum + 1):
        gain = speedup(acceptance_rate, k, costs)
        if gain > best_speedup:
            best, best_speedup = k, gain
    return best


@dataclass(frozen=True, slots=True)
class Speed:
    """Predicts the tokens per second of one sequence from measured step times.

    All `num_rows` sequences of the step have the same depth.
    """

    steps: StepTimes
    num_rows: int  # number of sequences: the rows of a step without drafts
    max_wait_seconds: float

    @property
    def plain(self) -> float:
        """Tokens per second without drafts. Requires a known step time."""
        rows = np.array([float(self.num_rows)])
        return float(1.0 / np.maximum(self.steps.seconds(rows, rows, 0.0), 1e-9)[0])

    def by_depth(self, survival: FloatArray, wait_seconds: FloatArray) -> FloatArray:
        """Returns the rates with 1, 2, ... drafts; 0 if a wait exceeds its limit or a step has no room for the rows.

        The last axis of `wait_seconds` is the depth; other axes are alternatives. Until a step is measured, a rate is
        tokens per second of waiting, which can only be used to compare draft workers.
        """
        depths = np.arange(1, len(survival) + 1)
        tokens = 1.0 + np.cumsum(survival)
        seconds = wait_seconds
        if self.steps.is_known:
            seconds = self.steps.seconds(self.num_rows * (1 + depths), self.num_rows * tokens, wait_seconds)
        fits = (wait_seconds <= self.max_wait_seconds) & (
            self.num_rows * depths <= self.steps.room_for_drafts(self.num_rows)
        )
        return np.where(fits, tokens / np.maximum(seconds, 1e-9), 0.0)


def _check_rate(rate: float) -> None:
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"a rate lies between 0 and 1, not {rate}")
