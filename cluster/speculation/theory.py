"""What speculation can gain, in closed form.

With every draft token accepted with probability a, independently (Leviathan, Kalman, Matias, "Fast inference
from transformers via speculative decoding", ICML 2023, equation 1 and theorem 3.8).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


def expected_tokens(acceptance_rate: float, num_speculative_tokens: int) -> float:
    """E = (1 - a**(k+1)) / (1 - a): tokens committed in a round of k drafts, the bonus token included."""
    _check_rate(acceptance_rate)
    if acceptance_rate == 1.0:
        return float(num_speculative_tokens + 1)
    return float((1 - acceptance_rate ** (num_speculative_tokens + 1)) / (1 - acceptance_rate))


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """Times of a round's parts, all in one unit."""

    draft_token: float  # the draft's time for one token
    verify: float  # the target's verify step, taken to cost as much as a decode step
    round_trip: float = 0.0


def speedup(acceptance_rate: float, num_speculative_tokens: int, costs: RoundCosts) -> float:
    """E * t_verify / (k * t_draft + t_verify + t_net): tokens per second against plain decoding."""
    round_time = num_speculative_tokens * costs.draft_token + costs.verify + costs.round_trip
    return expected_tokens(acceptance_rate, num_speculative_tokens) * costs.verify / round_time


def best_num_speculative_tokens(acceptance_rate: float, costs: RoundCosts, maximum: int = 64) -> int:
    """The k in 0 .. maximum with the largest speedup; 0, which is plain decoding, costs no round trip."""
    best, best_speedup = 0, 1.0
    for k in range(1, maximum + 1):
        gain = speedup(acceptance_rate, k, costs)
        if gain > best_speedup:
            best, best_speedup = k, gain
    return best


def approximate_best_num_speculative_tokens(acceptance_rate: float) -> float:
    """-1 / ln a, the rule of thumb for cheap drafts: the depth at which a draft survives with probability 1/e."""
    _check_rate(acceptance_rate)
    if acceptance_rate in (0.0, 1.0):
        return 0.0 if acceptance_rate == 0.0 else math.inf
    return -1.0 / math.log(acceptance_rate)


def coupled_acceptance_bound(total_variation: float) -> float:
    """(1 - TV) / (1 + TV): the least acceptance of shared-noise drafting (arXiv 2408.07978, theorem 1)."""
    _check_rate(total_variation)
    return (1 - total_variation) / (1 + total_variation)


def _check_rate(rate: float) -> None:
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"a rate lies between 0 and 1, not {rate}")
