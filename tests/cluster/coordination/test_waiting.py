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
    planner = DepthPlanner(SpeculationConfig.model_validate({"controller": controller}), 64, lambda: 0.0)
    for _ in range(50):
        for rows in (1, 4, 16, 32):
            planner.step_seconds.observe(rows, STEP_S + seconds_a_row * rows)
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
    ("wait_s", "goes_on"),
    [(0.001, False), (0.5 * STEP_S, False), (2 * STEP_S, True), (10 * STEP_S, True)],
)
def test_a_wait_longer_than_a_step_makes_two_cohorts(wait_s: float, goes_on: bool) -> None:
    """Where rows cost nothing, half the sequences commit half as much in the same time."""
    ready, awaited = sequences(2), sequences(2)
    assert waits(seconds_a_row=0.0).should_go_on_without(ready, awaited, wait_s) is goes_on


def test_where_rows_cost_a_wait_shorter_than_a_step_is_enough() -> None:
    ready, awaited = sequences(2), sequences(2)
    assert waits(seconds_a_row=0.01).should_go_on_without(ready, awaited, 0.03)  # steps of 0.12 and 0.22


def test_one_that_is_ready_does_not_run_without_many() -> None:
    assert not waits(seconds_a_row=0.0).should_go_on_without(sequences(1), sequences(7), 2 * STEP_S)


def test_with_nobody_ready_all_wait() -> None:
    assert not waits(seconds_a_row=0.0).should_go_on_without([], sequences(2), 10 * STEP_S)


def test_drafts_that_are_made_in_turn_are_waited_for() -> None:
    """They would not be made while the others run."""
    assert not waits(seconds_a_row=0.0, drafts_in_turn=True).should_go_on_without(
        sequences(2), sequences(2), 10 * STEP_S
    )


def test_a_fixed_depth_waits_for_all() -> None:
    assert not waits(0.0, "fixed").should_go_on_without(sequences(2), sequences(2), 10 * STEP_S)


@pytest.mark.parametrize(
    ("num_plain", "num_awaited", "wait_s", "goes_on"),
    [
        (16, 8, 0.1 * STEP_S, True),  # 16 would be slowed down for the sake of 8
        (16, 8, 0.01 * STEP_S, False),  # which nobody would notice
        (8, 16, 0.1 * STEP_S, False),
        (8, 8, 0.1 * STEP_S, False),
        (0, 8, 10 * STEP_S, False),
    ],
)
def test_most_sequences_do_not_wait_for_what_only_others_get(
    num_plain: int, num_awaited: int, wait_s: float, goes_on: bool
) -> None:
    assert waits(seconds_a_row=0.0).should_not_wait(num_plain, sequences(num_awaited), wait_s) is goes_on


def test_a_fixed_depth_is_waited_for_by_however_many() -> None:
    assert not waits(0.0, "fixed").should_not_wait(7, sequences(1), 10 * STEP_S)


@pytest.mark.parametrize("others_wait", [False, True])
def test_a_step_that_goes_without_a_late_proposal_learns_nothing_of_its_wait(others_wait: bool) -> None:
    """The late worker has not answered as soon as the others have."""
    now = [0.0]
    planner = DepthPlanner(SpeculationConfig(), 64, lambda: now[0])
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


def test_a_probe_has_the_whole_proposal_of_a_shadow_made() -> None:
    (shadow,), turns = sequences(1), []
    shadow.shadowed(is_shadow=True)
    shadow.asked(3, None, 0.0)

    def take_events(seconds: float) -> None:
        turns.append(seconds)
        if len(turns) == 3:
            shadow.answered(Proposal(1, 1, (5, 6, 7)), 0.0, CoordinatorStats())

    probing = waits(0.0, drafts_in_turn=True, take_events=take_events)
    probing.wait_for_shadows([shadow])
    assert len(turns) == 3
    probing.wait_for_shadows([shadow])  # is here
    assert len(turns) == 3
