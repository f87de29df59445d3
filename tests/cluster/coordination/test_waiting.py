"""The slowest proposal does not hold up the others when they are worth more than the wait, or wait for nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
import pytest

from cluster.config_speculation import SpeculationConfig
from cluster.coordination.balancer import LinkBalancer
from cluster.coordination.depths import DepthPlanner
from cluster.coordination.link import DraftLink
from cluster.coordination.sequence import ActiveLink, SpeculativeSequence
from cluster.coordination.stats import CoordinatorStats
from cluster.coordination.waiting import Waits
from cluster.coordination.worth import Worth
from cluster.speculation.costs import DraftStep, LinkCosts
from cluster.wire.messages import Proposal

from .scripted import new_sequence

STEP_S = 0.020


def waits(
    seconds_a_row: float,
    controller: str = "goodput",
    *,
    drafts_in_turn: bool = False,
    take_events: Callable[[float], None] = lambda _: None,
) -> Waits:
    planner = DepthPlanner(SpeculationConfig.model_validate({"controller": controller}), 64)
    for _ in range(50):
        for rows in (1, 4, 16, 32):
            planner.steps.curve.observe(rows, STEP_S + seconds_a_row * rows)
    return Waits(
        planner,
        LinkBalancer(64, 0.05, Worth(planner), 0.0),
        CoordinatorStats(),
        0.05,
        lambda: 0.0,
        take_events,
        drafts_in_turn=drafts_in_turn,
    )


def sequences(number: int) -> list[SpeculativeSequence]:
    made = [new_sequence(None, [1]) for _ in range(number)]
    for sequence in made:
        sequence.planned(4, None, 3.0)
    return made


@pytest.mark.parametrize(
    ("num_ready", "num_awaited", "seconds_a_row", "wait_s", "pays"),
    [
        # Where rows cost nothing, two that wait for three tokens each commit two of six less at once.
        (2, 2, 0.0, 0.001, True),
        (2, 2, 0.0, 0.4 * STEP_S, True),
        (2, 2, 0.0, 0.6 * STEP_S, False),
        # One that is ready does not run without many, and many do not wait for one.
        (1, 7, 0.0, STEP_S, True),
        (7, 1, 0.0, 0.2 * STEP_S, False),
        # Where a row costs half a step, drafts that are waited for cost more.
        (2, 2, 0.01, 0.015, False),
    ],
)
def test_a_wait_pays_if_it_brings_more_tokens_per_second(
    num_ready: int, num_awaited: int, seconds_a_row: float, wait_s: float, pays: bool
) -> None:
    assert waits(seconds_a_row).pays(sequences(num_ready), sequences(num_awaited), wait_s) is pays


def test_sequences_without_drafts_do_not_wait_long_for_a_few_that_have_some() -> None:
    plain = [new_sequence(0, [1]) for _ in range(12)]
    assert waits(0.0).pays(plain, sequences(2), 0.2 * STEP_S)  # 18 tokens in 1.2 steps for 14 in one
    assert not waits(0.0).pays(plain, sequences(2), 0.5 * STEP_S)


def test_a_fixed_depth_waits_for_all() -> None:
    assert waits(0.0, "fixed").pays(sequences(2), sequences(2), 10 * STEP_S)


@pytest.mark.parametrize("others_wait", [False, True])
def test_a_step_that_goes_without_a_late_proposal_learns_nothing_of_its_wait(others_wait: bool) -> None:
    """The late worker has not answered as soon as the others have."""
    now = [0.0]
    planner = DepthPlanner(SpeculationConfig(), 64)
    balancer = LinkBalancer(64, 0.05, Worth(planner), 0.0)
    late, on_time = SpeculativeLink("late", balancer), SpeculativeLink("on time", balancer)

    def take_events(seconds: float) -> None:
        now[0] += 0.001
        on_time.sequence.answered(Proposal(0, 1, [5]), now[0], CoordinatorStats())

    late.sequence.gave_up()
    if not others_wait:
        take_events(0.0)
    both = [late.sequence, on_time.sequence]
    Waits(planner, balancer, CoordinatorStats(), 0.05, lambda: now[0], take_events).wait(both)
    assert late.link.costs.wait_seconds(np.array([1]), np.array([1]))[0] == pytest.approx(0.010)
    assert on_time.link.costs.wait_seconds(np.array([1]), np.array([1]))[0] < 0.010


class SpeculativeLink:
    """A link whose proposals take 10 ms, with a sequence that has been asked for one."""

    def __init__(self, name: str, balancer: LinkBalancer) -> None:
        self.link = ActiveLink(cast(DraftLink, name), LinkCosts(64), name)
        self.link.costs.observe_reply(0.0, DraftStep(0.010, 1, 1))
        balancer.active[self.link.link] = self.link
        self.sequence = new_sequence(None, [1])
        self.sequence.opened(self.link, 0)
        self.sequence.has_answered = True
        self.sequence.planned(1, None, 2.0)
        self.sequence.advance(1, None, 0.0)
