"""The slowest proposal does not hold up the others when they are worth more than the wait, or wait for nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cluster.config.speculation import SpeculationConfig
from cluster.coordination.balancer import LinkBalancer
from cluster.coordination.depths import DepthPlanner
from cluster.coordination.link_value import LinkValue
from cluster.coordination.sequence import SpeculativeSequence
from cluster.coordination.stats import CoordinatorStats
from cluster.coordination.waiting import Waits
from cluster.speculation.acceptance_model import PositionRates, SequenceAcceptance
from cluster.wire.messages import Proposal

from .scripted import new_sequence

STEP_S = 0.020


def waits(
    seconds_a_row: float,
    controller: str = "goodput",
    *,
    runs_ahead: bool = False,
    drafts_in_turn: bool = False,
    take_events: Callable[[float], None] = lambda _: None,
) -> Waits:
    settings = {"controller": controller, "max_run_ahead": None if runs_ahead else 0}
    planner = DepthPlanner(SpeculationConfig.model_validate(settings), 64)
    for _ in range(50):
        for rows in (1, 4, 16, 32):
            planner.steps.curve.observe(rows, STEP_S + seconds_a_row * rows)
    return Waits(
        planner,
        LinkBalancer(64, 0.05, LinkValue(planner), 0.0),
        CoordinatorStats(),
        0.05,
        lambda: 0.0,
        take_events,
        drafts_in_turn=drafts_in_turn,
    )


def sequences(number: int, num_ready: int = 0, k: int | None = None) -> list[SpeculativeSequence]:
    made = [new_sequence(k, [1]) for _ in range(number)]
    for sequence in made:
        sequence.joined(SequenceAcceptance(PositionRates(4)), 4)
        sequence.planned(4, None, 3.0)
        sequence.asked(4, None, 0.0)
        sequence.answered(Proposal(0, 1, [5] * num_ready), 0.0, CoordinatorStats())
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
    awaited = sequences(num_awaited)
    assert waits(seconds_a_row).pays([*sequences(num_ready, 4), *awaited], awaited, wait_s) is pays


def test_where_drafters_run_ahead_half_of_what_a_wait_brings_counts() -> None:
    """Drafts that come late are used in the next step."""
    awaited = sequences(2)
    both = [*sequences(2, 4), *awaited]  # 12 tokens after the wait for 8 at once
    assert waits(0.0, runs_ahead=True).pays(both, awaited, 0.2 * STEP_S)
    assert not waits(0.0, runs_ahead=True).pays(both, awaited, 0.3 * STEP_S)
    assert waits(0.0).pays(both, awaited, 0.3 * STEP_S)


def test_while_prompts_wait_only_requests_with_depths_of_their_own_wait_for_drafts() -> None:
    free, asked = sequences(2), sequences(2, k=4)
    busy = waits(0.0)
    busy._planner.leaves_prompts_waiting = True
    assert not busy.pays([*sequences(2, 4), *free], free, 0.01 * STEP_S)
    assert busy.pays(asked, asked, STEP_S)


def test_sequences_without_drafts_do_not_wait_long_for_a_few_that_have_some() -> None:
    plain = [new_sequence(0, [1]) for _ in range(12)]
    awaited = sequences(2)
    assert waits(0.0).pays([*plain, *awaited], awaited, 0.2 * STEP_S)  # 18 tokens in 1.2 steps for 14 in one
    assert not waits(0.0).pays([*plain, *awaited], awaited, 0.5 * STEP_S)


def test_requests_that_asked_for_drafts_wait_until_one_has_them() -> None:
    asked, ready, free = sequences(2, k=4), sequences(1, 4, k=4), sequences(1)
    assert waits(0.0).pays(asked, asked, 10 * STEP_S)
    assert not waits(0.0).pays([*asked, *ready], asked, 10 * STEP_S)
    assert not waits(0.0).pays([*asked, *free], [*asked, *free], 10 * STEP_S)


def test_a_fixed_depth_waits_for_all() -> None:
    awaited = sequences(2)
    assert waits(0.0, "fixed").pays([*sequences(2, 4), *awaited], awaited, 10 * STEP_S)


def test_a_fixed_depth_waits_only_if_it_pays_where_drafters_run_ahead() -> None:
    awaited = sequences(2)
    both = [*sequences(2, 4), *awaited]
    assert waits(0.0, "fixed", runs_ahead=True).pays(both, awaited, 0.2 * STEP_S)
    assert not waits(0.0, "fixed", runs_ahead=True).pays(both, awaited, 0.3 * STEP_S)
