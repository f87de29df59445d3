from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from cluster.speculation.acceptance import count_accepted
from cluster.speculation.noise import NoiseKey, gumbel_noise
from cluster.speculation.speed import (
    RoundCosts,
    best_num_speculative_tokens,
    expected_tokens,
    speedup,
)

FALSE_ALARM = 1e-6  # of each statistical assertion
LARGEST_Z = float(stats.norm.isf(FALSE_ALARM / 2))

COSTS = RoundCosts(draft_token=2.0, verify=15.0, round_trip=0.5)


@pytest.mark.parametrize(
    ("rate", "by_depth"),
    [
        (0.5, {3: 1.88, 5: 1.97, 7: 1.99, 10: 2.00}),
        (0.7, {3: 2.53, 5: 2.94, 7: 3.14, 10: 3.27}),
        (0.8, {3: 2.95, 5: 3.69, 7: 4.16, 10: 4.57}),
        (0.9, {3: 3.44, 5: 4.69, 7: 5.70, 10: 6.86}),
        (0.0, {0: 1.00, 1: 1.00, 8: 1.00}),
        (1.0, {0: 1.00, 1: 2.00, 8: 9.00}),
    ],
)
def test_expected_tokens(rate: float, by_depth: dict[int, float]) -> None:
    assert {k: round(expected_tokens(rate, k), 2) for k in by_depth} == by_depth


@pytest.mark.parametrize(
    ("num_speculative_tokens", "by_rate"),
    [
        (3, {0.6: 1.52, 0.7: 1.77, 0.8: 2.06, 0.9: 2.40}),
        (5, {0.6: 1.40, 0.7: 1.73, 0.8: 2.17, 0.9: 2.76}),
        (7, {0.6: 1.25, 0.7: 1.60, 0.8: 2.12, 0.9: 2.90}),
        (10, {0.6: 1.05, 0.7: 1.38, 0.8: 1.93, 0.9: 2.90}),
        (15, {0.6: 0.82, 0.7: 1.10, 0.8: 1.60, 0.9: 2.69}),
    ],
)
def test_speedup(num_speculative_tokens: int, by_rate: dict[float, float]) -> None:
    assert {rate: round(speedup(rate, num_speculative_tokens, COSTS), 2) for rate in by_rate} == by_rate


@pytest.mark.parametrize(
    ("rate", "costs", "maximum", "best"),
    [
        (0.6, COSTS, 64, 3),
        (0.7, COSTS, 64, 4),
        (0.8, COSTS, 64, 5),
        (0.9, COSTS, 64, 8),
        (0.9, COSTS, 4, 4),
        (0.0, COSTS, 64, 0),
        (0.1, RoundCosts(draft_token=2.0, verify=15.0), 64, 0),  # the draft costs more than it gains
        (0.9, RoundCosts(draft_token=0.1, verify=1.0, round_trip=20.0), 64, 0),  # the network does
        (1.0, RoundCosts(draft_token=0.1, verify=1.0), 64, 64),
    ],
)
def test_the_best_depth(rate: float, costs: RoundCosts, maximum: int, best: int) -> None:
    assert best_num_speculative_tokens(rate, costs, maximum) == best


@pytest.mark.parametrize("rate", [0.3, 0.5, 0.65, 0.8, 0.93])
def test_no_depth_is_better_than_the_best(rate: float) -> None:
    best = best_num_speculative_tokens(rate, COSTS, maximum=20)
    gains = [1.0] + [speedup(rate, k, COSTS) for k in range(1, 21)]
    assert max(gains) == gains[best]


@pytest.mark.parametrize("rate", [-0.1, 1.1, math.nan])
def test_what_is_no_rate_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        expected_tokens(rate, 3)


@pytest.mark.parametrize("rate", [0.3, 0.7, 0.95])
@pytest.mark.parametrize("num_speculative_tokens", [1, 4, 10])
def test_rounds_of_independent_acceptances_commit_the_expected_tokens(rate: float, num_speculative_tokens: int) -> None:
    num_rounds, k = 4000, num_speculative_tokens
    agrees = np.random.default_rng(1).random((num_rounds, k)) < rate
    committed = np.array([1 + count_accepted([1] * k, [*row, 0]) for row in agrees.astype(int).tolist()])
    error = committed.std() / math.sqrt(num_rounds)
    assert abs(committed.mean() - expected_tokens(rate, k)) < LARGEST_Z * error


@pytest.mark.parametrize("concentration", [0.1, 1.0, 10.0])
def test_shared_noise_accepts_at_least_the_bound_and_as_often_as_computed(concentration: float) -> None:
    num_draws, vocab_size = 4000, 16
    random = np.random.default_rng(7)
    for pair in range(4):
        p, q = random.dirichlet(np.full(vocab_size, concentration), size=2) + 1e-12
        noise = gumbel_noise([(NoiseKey.derive(seed, pair), seed % 97) for seed in range(num_draws)], vocab_size)
        accepted = float(np.mean((np.log(p) + noise).argmax(-1) == (np.log(q) + noise).argmax(-1)))
        # Token i wins in both when the smallest of its arrivals is smaller than everyone's.
        exact = sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in range(vocab_size))
        margin = LARGEST_Z * math.sqrt(exact * (1 - exact) / num_draws)
        total_variation = float(np.abs(p - q).sum() / 2)
        assert abs(accepted - exact) < margin
        assert accepted > (1 - total_variation) / (1 + total_variation) - margin  # arXiv 2408.07978, theorem 1
        assert accepted < 1 - total_variation + margin  # no coupling does better
