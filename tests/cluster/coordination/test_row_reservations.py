"""Rows for drafts that do not come are not reserved, unless they cost nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from cluster.coordination.row_reservations import RowReservations
from cluster.coordination.sequence import SpeculativeSequence
from cluster.coordination.stats import CoordinatorStats
from cluster.speculation.acceptance_model import PositionRates, SequenceAcceptance
from cluster.speculation.drafts import Drafts
from cluster.speculation.step_times import StepTimes
from cluster.wire.messages import Proposal

from .scripted import new_sequence

DEPTH = 4
STEP_SECONDS = 0.020
CHEAP, COSTLY = 1e-6, 1e-3  # seconds of a row
RATES = PositionRates(DEPTH)
for _ in range(200):
    RATES.observe(DEPTH, DEPTH)
NOTHING, SOME = Drafts(), Drafts([5, 5])


def reservations(seconds_a_row: float) -> RowReservations:
    steps = StepTimes(256)
    for _ in range(50):
        for rows in (1, 2, 4, 8, 16, 32, 64):
            steps.curve.observe(rows, STEP_SECONDS + seconds_a_row * rows)
    return RowReservations(steps, DEPTH)


def sequences(number: int, num_proposed: int = 0) -> list[SpeculativeSequence]:
    made = [new_sequence(None, [1]) for _ in range(number)]
    for sequence in made:
        sequence.joined(SequenceAcceptance(RATES), DEPTH)
        sequence.planned(DEPTH, None, 3.0)
        sequence.asked(DEPTH, None, 0.0)
        if num_proposed:
            sequence.answered(Proposal(0, 1, [5] * num_proposed), 0.0, CoordinatorStats())
    return made


def reserved(
    rows: RowReservations, decoding: Sequence[SpeculativeSequence], verified: Drafts = NOTHING
) -> Mapping[SpeculativeSequence, int]:
    return rows.reserve(dict.fromkeys(decoding, DEPTH), dict.fromkeys(decoding, verified), len(decoding))


def learn(
    rows: RowReservations, decoding: Sequence[SpeculativeSequence], num_found: int, verified: Drafts = NOTHING
) -> None:
    for _ in range(20):
        reserved(rows, decoding, verified)
        rows.reserve({}, dict.fromkeys(decoding, Drafts([5] * num_found)), 0)


@pytest.mark.parametrize("seconds_a_row", [CHEAP, COSTLY])
def test_drafts_that_always_come_get_their_rows(seconds_a_row: float) -> None:
    rows, decoding = reservations(seconds_a_row), sequences(8)
    learn(rows, decoding, DEPTH)
    assert set(reserved(rows, decoding).values()) == {DEPTH}


def test_drafts_that_never_come_get_no_rows_that_cost_time() -> None:
    costly, cheap, decoding = reservations(COSTLY), reservations(CHEAP), sequences(8)
    for rows in (costly, cheap):
        learn(rows, decoding, 1)
    assert set(reserved(costly, decoding).values()) == {1}
    learn(cheap, decoding[:1], 1)
    assert reserved(cheap, decoding[:1])[decoding[0]] > 0


def test_unreserved_rows_are_tried_again() -> None:
    rows, decoding = reservations(COSTLY), sequences(8)
    learn(rows, decoding, 0)
    tried = []
    for _ in range(1000):
        tried.append(max(reserved(rows, decoding).values()))
    assert 0 < sum(number > 0 for number in tried) < 50


def test_arrival_depends_on_what_the_running_step_verifies() -> None:
    rows, idle, busy = reservations(COSTLY), sequences(4), sequences(4, num_proposed=len(SOME))
    for _ in range(20):
        learn(rows, idle, DEPTH)
        learn(rows, busy, 0, SOME)
    together = rows.reserve(dict.fromkeys([*idle, *busy], DEPTH), dict.fromkeys(busy, SOME), 8)
    assert {together[sequence] for sequence in idle} == {DEPTH}
    assert {together[sequence] for sequence in busy} == {0}


def test_partly_verified_proposals_are_counted_separately() -> None:
    rows, without, with_rest = reservations(COSTLY), sequences(4, len(SOME)), sequences(4, len(SOME) + 2)
    for _ in range(20):
        learn(rows, without, 0, SOME)
        learn(rows, with_rest, DEPTH, SOME)
    decoding = [*without, *with_rest]
    found = rows.reserve(dict.fromkeys(decoding, DEPTH), dict.fromkeys(decoding, SOME), 8)
    assert [found[sequence] for sequence in decoding] == [0] * 4 + [DEPTH] * 4


def test_no_sequence_gets_more_rows_than_it_may_use() -> None:
    rows, decoding = reservations(CHEAP), sequences(3)
    depths = dict(zip(decoding, (0, 1, DEPTH), strict=True))
    found = rows.reserve(depths, {}, 3)
    assert all(found[sequence] <= depth for sequence, depth in depths.items())
    assert rows.reserve({}, {}, 3) == {}
