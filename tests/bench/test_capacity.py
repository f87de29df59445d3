"""Tests of what the capacity bench computes from its points."""

from __future__ import annotations

import pytest

from bench.capacity import Figures, Limit, Point, most_clients
from cluster.speculation.speed import acceptance_rate_of


def point(num_clients: int, first_token_p99: float, between_tokens_p99: float) -> Point:
    figures = Figures(1.0, 1.0, first_token_p99, 1.0, between_tokens_p99, 1.0, 0.0)
    return Point(num_clients, figures, figures)


def test_the_most_clients_lie_where_the_first_limit_is_crossed() -> None:
    points = [point(8, 100, 20), point(16, 200, 30), point(32, 250, 50)]
    # between tokens from 30 to 50 over 16 clients: 40 at 24; the first token reaches 300 nowhere
    assert most_clients(points, Limit(300, 40)) == (pytest.approx(24.0), False)
    # the first token from 100 to 200 over 8 clients: 150 at 12
    assert most_clients(points, Limit(150, 60)) == (pytest.approx(12.0), False)


def test_beyond_what_was_run_nothing_is_said() -> None:
    points = [point(8, 100, 20), point(16, 200, 30)]
    assert most_clients(points, Limit(300, 40)) == (16.0, True)
    assert most_clients(points, Limit(300, 10)) == (0.0, False)


def test_the_rate_behind_an_acceptance_length() -> None:
    # 1 + 0.5 + 0.25 + 0.125 = 1.875
    assert acceptance_rate_of(1.875, 3) == pytest.approx(0.5)
