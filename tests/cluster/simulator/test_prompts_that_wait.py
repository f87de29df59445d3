"""Where steps cannot compute all the prompts that their tokens bring, drafts only make the steps longer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.planning.overheads import NOTHING
from cluster.simulator.cluster import MeasuredSpan
from cluster.simulator.drafts import HAND_OVER_SECONDS
from cluster.simulator.traffic import ClosedTraffic, Lengths
from tests.cluster.simulator.clusters import ran, streams
from tests.soak import length

# A 190M target and its draft on two cores without matrix units: 55 tokens of prompts take the 50 ms that a step has.
COSTS = (
    "simulation.target_step_ms=[[1,20],[64,95],[128,150],[192,215],[325,315],[512,480]]",
    "simulation.draft_step_ms=[[1,0.5],[64,4]]",
    "simulation.round_trip_ms=0.5",
    "speculation.max_run_ahead=0",
)
STREAMS, SECONDS, ANSWERS = 64, 90.0, Lengths(96, 160)
CASES = [(0.8, Lengths(300, 400)), *length([], [(0.85, Lengths(80, 160)), (0.85, Lengths(150, 250))])]


def tokens_per_second(prompts: Lengths, *settings: str) -> float:
    # Begun one by one: streams that begin at once have their prompts at once, for longer than a run.
    traffic = ClosedTraffic(STREAMS, SECONDS, prompts, ANSWERS, seed=1, ramp_seconds=SECONDS / 6)
    span = MeasuredSpan(SECONDS / 3, SECONDS, is_cut=True)
    return ran(traffic, *COSTS, *settings, span=span).figures().tokens_per_second


@pytest.mark.parametrize(("acceptance", "prompts"), CASES)
def test_the_controller_leaves_them_out(acceptance: float, prompts: Lengths) -> None:
    accepted = f"simulation.acceptance={acceptance}"
    fixed = [
        tokens_per_second(prompts, accepted, "speculation.controller=fixed", f"speculation.num_speculative_tokens={k}")
        for k in length((0, 1, 3), range(4))
    ]
    assert tokens_per_second(prompts, accepted) >= 0.95 * max(fixed)  # with what it tries before it knows
    assert fixed == sorted(fixed, reverse=True)  # or there would be nothing to leave out


def test_it_does_so_where_short_prompts_have_little_time_in_a_step() -> None:
    settings = ("simulation.acceptance=0.9", "target.max_prefill_ms=15")
    span, programs = MeasuredSpan(30.0, SECONDS, is_cut=True), replace(NOTHING, hand_over=HAND_OVER_SECONDS)
    plain = ("speculation.controller=fixed", "speculation.num_speculative_tokens=0")
    auto, without = (
        ran(streams(32, SECONDS), *COSTS, *settings, *own, span=span, programs=programs).figures()
        for own in ((), plain)
    )
    assert auto.mean_k < 1.0  # 2.6 were every prompt computed in its step
    assert auto.tokens_per_second >= 0.98 * without.tokens_per_second
