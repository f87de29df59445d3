"""Predicts an answer's mean time per output token after its first, over answers: the mean and p99.

n tokens take (n + overshoot) / E rounds on average, where E is the mean of the number X of tokens of a round. The
overshoot of the last round is (E[X^2] / E - 1) / 2. The variance of the number of rounds is n * Var(X) / E^3 (renewal
theory: Cox 1962). The sum of the steps' times is assumed to be normal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Value = TypeVar("Value", float, FloatArray)

Z99 = 2.3263478740408408  # 99th percentile of the normal distribution


def token_moments(survival: Sequence[float]) -> tuple[float, float]:
    """Returns E[X] and E[X^2] of the number X of tokens of a round.

    `survival`: P(X > j) for j = 1, 2, ..., k; so E[X^2] is 1 plus the sum of (2j + 1) P(X > j).
    """
    square = sum((2 * level + 1) * probability for level, probability in enumerate(survival, start=1))
    return 1.0 + sum(survival), 1.0 + square


def mean_rounds(mean_tokens: Value, mean_square: Value, num_tokens: float) -> Value:
    """Returns the mean number of rounds until `num_tokens` are committed. Surplus tokens of the last round are lost.

    `mean_tokens`, `mean_square`: E[X] and E[X^2] of the tokens X of a round.
    """
    return (num_tokens + (mean_square / mean_tokens - 1) / 2) / mean_tokens


def seconds_per_token_p99(
    mean_tokens: Value,
    mean_square: Value,
    num_tokens: float,
    step_seconds: Value | float,
    step_variance: Value | float,
) -> Value:
    """Returns the p99 of the mean seconds per token of `num_tokens` tokens.

    Steps take `step_seconds` on average, prompts and waits included.
    """
    rounds = mean_rounds(mean_tokens, mean_square, num_tokens)
    variance = num_tokens * (mean_square - mean_tokens**2) / mean_tokens**3 * step_seconds**2
    p99: Value = (rounds * step_seconds + Z99 * (rounds * step_variance + variance) ** 0.5) / num_tokens
    return p99
