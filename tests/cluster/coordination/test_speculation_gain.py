"""Compares the gauges of speculation with its actual gain, with simulated engines in virtual time."""

from __future__ import annotations

import math

import pytest

from bench.gain import GAIN, GOODPUT, run
from cluster.config.file import load_config
from cluster.simulator.virtual import VirtualCluster
from tests.soak import length

WITHIN = 0.15


@pytest.mark.parametrize("num_streams", [1, 8, 32])
@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9])
def test_the_gain_is_that_of_tokens_a_second(acceptance: float, num_streams: int) -> None:
    plain, auto = (run(acceptance, num_streams, k, seconds=length(12.0, 30.0)) for k in (0, None))
    assert auto.gain == pytest.approx(auto.tokens_per_second / plain.tokens_per_second, rel=WITHIN)


@pytest.mark.parametrize(("acceptance", "best_depth"), [(0.3, 1), (0.6, 1)])
def test_what_drafts_would_give_is_known_while_nothing_is_speculated_on(acceptance: float, best_depth: int) -> None:
    # A probe costs at most half a percent, so there is one every 32 steps of 100 ms: 45 of them until the readings.
    # Nothing is learned where requests ask for their k.
    auto = run(acceptance, 32, None, warm_up_seconds=150.0, seconds=length(10.0, 30.0))
    plain, forced = (run(acceptance, 32, depth, seconds=length(10.0, 30.0)) for depth in (0, best_depth))
    assert auto.depth < 0.1
    assert auto.gain == pytest.approx(1.0, abs=1e-3)
    assert auto.goodput < 1.0
    assert auto.goodput == pytest.approx(forced.tokens_per_second / plain.tokens_per_second, rel=WITHIN)


def test_a_fixed_depth_has_one_too() -> None:
    settings = [
        "target.engine=simulated",
        "draft.drafter=simulated",
        "simulation.acceptance=0.8",
        "speculation.controller=fixed",
    ]
    cluster = VirtualCluster(load_config(None, settings))
    cluster.submit(2000)
    cluster.run(10.0)
    assert 1.3 < cluster.readings(GAIN)["simulated",] < 4.0


def test_it_is_one_when_nothing_runs_and_always_finite() -> None:
    settings = ["target.engine=simulated", "draft.drafter=simulated", "simulation.acceptance=0.9"]
    cluster = VirtualCluster(load_config(None, settings))
    assert cluster.readings(GAIN) == cluster.readings(GOODPUT) == {}
    cluster.submit(200)
    cluster.run(10.0)
    cluster.time.seconds += 60.0
    assert cluster.readings(GAIN) == {("simulated",): 1.0}
    (goodput,) = cluster.readings(GOODPUT).values()
    assert math.isfinite(goodput)
    assert 1.0 < goodput < 17.0
