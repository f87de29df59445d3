"""The way to draft that buys the most requests, and what would change it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from cluster.planning.choice import Capacity, best, capacity, reversals
from cluster.planning.latency import LatencyLimits
from cluster.planning.prediction import ExpectedLoad, Option
from cluster.planning.round_costs import Drafting
from cluster.planning.steps import MeasuredSteps, NoSteps
from cluster.planning.workloads import WORKLOADS

_LOAD = ExpectedLoad(1, 100, 64)
_ALONE = Option("alone", MeasuredSteps(((1, 0.020), (100, 0.020), (200, 0.060))), target_dollars_per_hour=12.0)
_FREE = replace(_ALONE, name="free", drafting=Drafting(NoSteps(), 0.8))
_POOL = replace(_FREE, name="pool", draft_dollars_per_hour=1.0)
_DEAR = replace(_POOL, draft_dollars_per_hour=24.0)
_LIMITS = LatencyLimits(1.0, 0.030)


@pytest.fixture(scope="module")
def capacities() -> list[Capacity]:
    return [capacity(option, _LOAD, _LIMITS) for option in (_ALONE, _FREE, _POOL, _DEAR)]


def test_a_draft_has_to_be_worth_its_dollars(capacities: list[Capacity]) -> None:
    alone, free, pool, dear = capacities
    assert pool.requests_per_second == free.requests_per_second
    assert pool.requests_per_dollar == pytest.approx(free.requests_per_dollar * 12 / 13)
    assert best([alone, pool]) is pool
    assert best([alone, pool, free]) is free
    # at 24 dollars the pool's GPU is not used
    assert dear.requests_per_dollar == alone.requests_per_dollar


def test_what_would_change_the_choice(capacities: list[Capacity]) -> None:
    alone, free, pool, _ = capacities
    price = next(text for text in reversals([free, pool], _LOAD, _LIMITS) if "GPU" in text)
    assert price.startswith("pool if ")
    assert "alone if free has less than" in next(iter(reversals([alone, free], _LOAD, _LIMITS)))


def test_a_limit_that_one_sequence_exceeds_leaves_nothing() -> None:
    nothing = capacity(_ALONE, _LOAD, LatencyLimits(1.0, 0.001))
    assert (nothing.plan, nothing.requests_per_dollar) == (None, 0.0)


def test_every_workload_names_its_sources() -> None:
    assert [one.name for one in WORKLOADS] == ["chat", "long documents", "agents", "code", "batch"]
    for workload in WORKLOADS:
        assert all(workload.sources.values())
        assert workload.limits.first_token > 0.1
    assert math.isinf(WORKLOADS[-1].limits.first_token)
