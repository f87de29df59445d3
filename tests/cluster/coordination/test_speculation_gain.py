"""Compares the gauges of speculation with its actual gain, with simulated engines in virtual time."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass

import pytest

from bench.in_process import SIMULATED
from cluster.config.file import load_config
from cluster.simulator.virtual import VirtualCluster
from tests.soak import length

GAIN, GOODPUT = "outrider_speculation_gain_ratio", "outrider_goodput_ratio"
FOREVER = 50_000  # tokens
WITHIN = 0.15


@dataclass(frozen=True, slots=True)
class Course:
    """Results of one run, after its warm-up. Ratios are means over readings."""

    tokens_per_second: float
    depth: float
    gain: float = 1.0
    goodput: float = 1.0


def run(
    acceptance: float,
    num_streams: int,
    num_speculative_tokens: int | None,
    *,
    round_trip_ms: float = 2.0,
    warm_up_seconds: float = 10.0,
    seconds: float = 30.0,
) -> Course:
    """`num_speculative_tokens`: what all requests ask for; None: the controller chooses."""
    settings = {
        "simulation.acceptance": acceptance,
        "simulation.round_trip_ms": round_trip_ms,
        "target.max_num_batched_tokens": 2048,
        "target.max_model_len": 100_000,
        "draft.max_num_batched_tokens": 2048,
    }
    cluster = VirtualCluster(load_config(None, [*SIMULATED, *(f"{key}={value}" for key, value in settings.items())]))
    for _ in range(num_streams):
        cluster.submit(FOREVER, num_speculative_tokens=num_speculative_tokens)
    cluster.run(warm_up_seconds)
    started_at, before = cluster.time.now(), (cluster.num_tokens, cluster.num_draft_tokens, cluster.num_rounds)
    gains, goodputs = [], []
    while cluster.time.now() < started_at + seconds:
        cluster.run(1.0)
        gains += cluster.readings(GAIN).values()
        goodputs += cluster.readings(GOODPUT).values()
    tokens, drafts, rounds = (
        now - then
        for now, then in zip((cluster.num_tokens, cluster.num_draft_tokens, cluster.num_rounds), before, strict=True)
    )
    means = (statistics.fmean(ratios) if ratios else 1.0 for ratios in (gains, goodputs))
    return Course(tokens / (cluster.time.now() - started_at), drafts / rounds, *means)


@pytest.mark.parametrize(
    ("acceptance", "num_streams"),
    length([(0.3, 8), (0.6, 32), (0.9, 8)], list(itertools.product((0.3, 0.6, 0.9), (1, 8, 32)))),
)
def test_the_gain_is_that_of_tokens_a_second(acceptance: float, num_streams: int) -> None:
    plain, auto = (run(acceptance, num_streams, k, seconds=length(12.0, 30.0)) for k in (0, None))
    assert auto.gain == pytest.approx(auto.tokens_per_second / plain.tokens_per_second, rel=WITHIN)


@pytest.mark.parametrize(("acceptance", "best_depth"), length([(0.6, 1)], [(0.3, 1), (0.6, 1)]))
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
