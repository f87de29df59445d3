from __future__ import annotations

import time

import pytest

from cluster.simulated_engines.steps import REAL_TIME, StepCurve


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


def test_sleeping_takes_the_time_and_not_the_processor():
    cpu, started_at = time.thread_time(), time.perf_counter()
    for _ in range(20):
        REAL_TIME.sleep_until(time.perf_counter() + 0.005)
    assert time.perf_counter() - started_at >= 0.1
    assert time.thread_time() - cpu < 0.02
