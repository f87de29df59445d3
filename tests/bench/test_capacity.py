"""Figures that the capacity bench computes from its points."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.capacity import Cell, compared
from bench.placed import SimulatedPoint, within
from cluster.planning.latency import LatencyLimits
from cluster.planning.options import BESIDE
from cluster.speculation.speed import acceptance_rate_of


def point(num_clients: int, first_token_p99: float, between_tokens_p99: float) -> SimulatedPoint:
    return SimulatedPoint(num_clients, 2000, 0.0, num_clients / 4, first_token_p99, between_tokens_p99)


def test_the_most_clients_lie_where_the_first_limit_is_crossed() -> None:
    points = [point(8, 0.1, 0.020), point(16, 0.2, 0.030), point(32, 0.25, 0.050)]
    # between tokens from 30 to 50 ms over 16 clients: 40 at 24; the first token reaches 300 nowhere
    found = within(points, LatencyLimits(0.3, 0.040))
    assert (found.num_clients, found.is_at_least) == (pytest.approx(24.0), False)
    assert found.requests_per_second == pytest.approx(6.0)
    # the first token from 100 to 200 ms over 8 clients: 150 at 12
    assert within(points, LatencyLimits(0.15, 0.060)).num_clients == pytest.approx(12.0)


def test_beyond_what_was_run_nothing_is_known() -> None:
    points = [point(8, 0.1, 0.020), point(16, 0.2, 0.030)]
    assert (
        within(points, LatencyLimits(0.3, 0.040)).num_clients,
        within(points, LatencyLimits(0.3, 0.040)).is_at_least,
    ) == (
        16,
        True,
    )
    assert within(points, LatencyLimits(0.3, 0.010)).num_clients == 0


def test_a_pool_is_compared_with_the_same_draft_on_the_targets_gpus() -> None:
    beside = Cell(128, BESIDE, 300.0, 25.0, 20.0, False, 20, None, 2000)
    one_pass = replace(beside, option=f"{BESIDE}, one pass", clients=40.0)
    pools = [replace(beside, option=name, clients=30.0) for name in ("pool, 10 ms away", "pool, 10 ms away, one pass")]
    assert [cell.over_targets_gpus for cell in compared([beside, one_pass, *pools])] == [None, None, 1.5, 0.75]


def test_the_rate_behind_an_acceptance_length() -> None:
    # 1 + 0.5 + 0.25 + 0.125 = 1.875
    assert acceptance_rate_of(1.875, 3) == pytest.approx(0.5)
