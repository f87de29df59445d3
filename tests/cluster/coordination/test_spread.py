"""Sequences go to the draft workers that serve them fastest, leave those that fail, and do not wander."""

from __future__ import annotations

import itertools

import pytest

from cluster.coordination.link import DraftLink
from cluster.coordination.sequence import SpeculativeSequence
from cluster.coordination.spread import LinkUse, Spread
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams

TIMEOUT_S = 0.05
SILENT_S = 10 * TIMEOUT_S
DEPTH = 4
numbers = itertools.count(1)


def new_link(name: str) -> DraftLink:
    return DraftLink(name, "fingerprint", lambda _: None)


def put(use: LinkUse, count: int = 1) -> list[SpeculativeSequence]:
    sequences = [SpeculativeSequence([1], 1, SamplingParams(), NoiseKey(1, 2), DEPTH) for _ in range(count)]
    for sequence in sequences:
        sequence.name, sequence.link = next(numbers), use.link
        use.sequences[sequence.name] = sequence
    return sequences


def answers(use: LinkUse, seconds: float, repeats: int = 60) -> None:
    """Proposals take so long, all of it in the network."""
    for _ in range(repeats):
        use.costs.observe_reply(seconds, 0.0, 1e-6, 1)


@pytest.fixture
def spread() -> Spread:
    return Spread(64, TIMEOUT_S)


def uses(spread: Spread, count: int) -> list[LinkUse]:
    for index in range(count):
        spread.add(new_link(str(index)))
    return list(spread.uses.values())


class TestChoice:
    def test_none_while_no_link_is_up(self, spread: Spread) -> None:
        assert spread.choose(DEPTH, 10, 0.0) is None

    def test_alike_workers_share_evenly(self, spread: Spread) -> None:
        own = uses(spread, 3)
        for use in own:
            answers(use, 0.002)
        for _ in range(9):
            use = spread.choose(DEPTH, 10, 0.0)
            assert use is not None
            put(use)
        assert [len(use.sequences) for use in own] == [3, 3, 3]

    def test_the_nearer_one_is_preferred(self, spread: Spread) -> None:
        near, far = uses(spread, 2)
        answers(near, 0.001)
        answers(far, 0.020)
        put(near, 5)
        assert spread.choose(DEPTH, 10, 0.0) is near

    def test_an_unknown_one_gets_its_chance_but_not_everything(self, spread: Spread) -> None:
        known, unknown = uses(spread, 2)
        answers(known, 0.001)
        put(known)
        assert spread.choose(DEPTH, 10, 0.0) is unknown
        put(unknown, 2)
        assert spread.choose(DEPTH, 10, 0.0) is known

    def test_one_without_room_is_passed_over(self, spread: Spread) -> None:
        full, other = uses(spread, 2)
        full.credit = 9
        put(other, 5)
        assert spread.choose(DEPTH, 10, 0.0) is other
        other.credit = 0
        assert spread.choose(DEPTH, 10, 0.0) is None
        full.credit = 10
        assert spread.choose(DEPTH, 10, 0.0) is full


class TestEjection:
    def test_a_silent_worker_is_ejected(self, spread: Spread) -> None:
        silent, other = uses(spread, 2)
        silent.late_since = 1.0
        assert spread.to_eject(1.0 + TIMEOUT_S) == []
        assert spread.to_eject(1.0 + SILENT_S) == [silent]
        assert spread.choose(DEPTH, 10, 1.0 + SILENT_S) is other
        assert spread.num_ejections == 1

    def test_it_comes_back_after_a_pause_that_grows(self, spread: Spread) -> None:
        silent, other = uses(spread, 2)
        put(other, 5)
        pauses = []
        now = 0.0
        for _ in range(3):
            silent.late_since = now
            now += SILENT_S
            assert spread.to_eject(now) == [silent]
            start = now
            while spread.choose(DEPTH, 10, now) is not silent:
                now += 0.1
            pauses.append(now - start)
        assert pauses[1] > 1.5 * pauses[0]
        assert pauses[2] > 1.5 * pauses[1]

    def test_at_most_half_are_out(self, spread: Spread) -> None:
        own = uses(spread, 4)
        for use in own:
            use.late_since = 0.0
        assert len(spread.to_eject(SILENT_S)) == 2

    def test_never_the_only_one(self, spread: Spread) -> None:
        (only,) = uses(spread, 1)
        only.late_since = 0.0
        assert spread.to_eject(100.0) == []
        assert spread.choose(DEPTH, 10, 100.0) is only


class TestMoves:
    def test_a_worker_that_became_slow_hands_half_over(self, spread: Spread) -> None:
        slow, fast = uses(spread, 2)
        answers(slow, 0.020)
        answers(fast, 0.002)
        sequences = put(slow, 4)
        assert spread.to_move(DEPTH, 1.0) == sequences[:2]

    def test_what_was_moved_stays(self, spread: Spread) -> None:
        slow, fast = uses(spread, 2)
        answers(slow, 0.020)
        answers(fast, 0.002)
        (sequence,) = put(slow)
        assert spread.to_move(DEPTH, 1.0) == [sequence]
        assert spread.to_move(DEPTH, 3.0) == []

    def test_small_differences_move_nothing(self, spread: Spread) -> None:
        own = uses(spread, 2)
        answers(own[0], 0.003)
        answers(own[1], 0.002)
        put(own[0], 4)
        for now in range(1, 10):
            assert spread.to_move(DEPTH, float(now)) == []

    def test_nothing_moves_to_a_worker_that_nothing_is_known_of(self, spread: Spread) -> None:
        slow, _ = uses(spread, 2)
        answers(slow, 0.020)
        put(slow, 4)
        assert spread.to_move(DEPTH, 1.0) == []
