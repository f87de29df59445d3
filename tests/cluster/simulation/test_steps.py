from __future__ import annotations

import itertools
import time

import pytest

from cluster.simulation.steps import StepCurve, sleep_until
from cluster.simulation.tokens import token_at, uniform_at
from cluster.speculation.noise import NoiseKey


@pytest.mark.parametrize(
    ("points", "count", "ms"),
    [
        (((1, 5.0),), 100, 5.0),
        (((4, 5.0), (8, 9.0)), 1, 5.0),
        (((4, 5.0), (8, 9.0)), 4, 5.0),
        (((4, 5.0), (8, 9.0)), 7, 8.0),
        (((4, 5.0), (8, 9.0)), 8, 9.0),
        (((4, 5.0), (8, 9.0)), 10, 11.0),
    ],
)
def test_a_curve_is_linear_between_points_and_goes_on_beyond(points, count, ms):
    assert StepCurve(points).at(count) == pytest.approx(ms / 1e3)


def test_the_hash_is_that_of_the_published_generator():
    """SplitMix64 with seed 0 begins with e220a8397b1dcdaf."""
    assert token_at(NoiseKey(0, 0), 0, 2**64) == 0xE220A8397B1DCDAF


def test_uniform_numbers_are_uniform():
    """Pearson's chi-square over 16 cells; 37.7 is exceeded by one in a thousand."""
    counts = [0] * 16
    for seed, position in itertools.product(range(40), range(400)):
        counts[int(16 * uniform_at(NoiseKey.derive(seed, 0), position))] += 1
    assert sum((count - 1000) ** 2 / 1000 for count in counts) < 37.7


def test_sleeping_takes_the_time_and_not_the_processor():
    cpu, started_at = time.thread_time(), time.perf_counter()
    for _ in range(20):
        sleep_until(time.perf_counter() + 0.005)
    assert time.perf_counter() - started_at >= 0.1
    assert time.thread_time() - cpu < 0.02
