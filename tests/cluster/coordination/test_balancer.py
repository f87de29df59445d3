"""Sequences go to the draft workers that serve them fastest, leave those that fail, and do not wander."""

from __future__ import annotations

import itertools

import pytest

from cluster.coordination.balancer import LinkBalancer
from cluster.coordination.link import DraftLink
from cluster.coordination.sequence import ActiveLink, SpeculativeSequence

from .scripted import new_sequence

TIMEOUT_S = 0.05
SILENT_S = 10 * TIMEOUT_S
DEPTH = 4
numbers = itertools.count(1)


def new_link(name: str) -> DraftLink:
    return DraftLink(name, "fingerprint", lambda _: None)


def put(link: ActiveLink, count: int = 1) -> list[SpeculativeSequence]:
    sequences = [new_sequence(DEPTH, [1]) for _ in range(count)]
    for sequence in sequences:
        sequence.opened(link, next(numbers))
    return sequences


def answers(link: ActiveLink, seconds: float, repeats: int = 60) -> None:
    """Proposals take so long, all of it in the network."""
    for _ in range(repeats):
        link.costs.observe_reply(seconds, 0.0, 1e-6, 1)


@pytest.fixture
def balancer() -> LinkBalancer:
    return LinkBalancer(64, TIMEOUT_S)


def links(balancer: LinkBalancer, count: int) -> list[ActiveLink]:
    for index in range(count):
        balancer.add(new_link(str(index)))
    return list(balancer.active.values())


class TestChoice:
    def test_none_while_no_link_is_up(self, balancer: LinkBalancer) -> None:
        assert balancer.choose(DEPTH, 10, 0.0) is None

    def test_alike_workers_share_evenly(self, balancer: LinkBalancer) -> None:
        active = links(balancer, 3)
        for link in active:
            answers(link, 0.002)
        for _ in range(9):
            link = balancer.choose(DEPTH, 10, 0.0)
            assert link is not None
            put(link)
        assert [len(link.sequences) for link in active] == [3, 3, 3]

    def test_the_nearer_one_is_preferred(self, balancer: LinkBalancer) -> None:
        near, far = links(balancer, 2)
        answers(near, 0.001)
        answers(far, 0.020)
        put(near, 5)
        assert balancer.choose(DEPTH, 10, 0.0) is near

    def test_an_unknown_one_gets_its_chance_but_not_everything(self, balancer: LinkBalancer) -> None:
        known, unknown = links(balancer, 2)
        answers(known, 0.001)
        put(known)
        assert balancer.choose(DEPTH, 10, 0.0) is unknown
        put(unknown, 2)
        assert balancer.choose(DEPTH, 10, 0.0) is known

    def test_one_without_room_is_passed_over(self, balancer: LinkBalancer) -> None:
        full, other = links(balancer, 2)
        full.credit = 9
        put(other, 5)
        assert balancer.choose(DEPTH, 10, 0.0) is other
        other.credit = 0
        assert balancer.choose(DEPTH, 10, 0.0) is None
        full.credit = 10
        assert balancer.choose(DEPTH, 10, 0.0) is full


class TestEjection:
    def test_a_silent_worker_is_ejected(self, balancer: LinkBalancer) -> None:
        silent, other = links(balancer, 2)
        silent.late_since = 1.0
        assert balancer.to_eject(1.0 + TIMEOUT_S) == []
        assert balancer.to_eject(1.0 + SILENT_S) == [silent]
        assert balancer.choose(DEPTH, 10, 1.0 + SILENT_S) is other
        assert balancer.num_ejections == 1

    def test_it_comes_back_after_a_pause_that_grows(self, balancer: LinkBalancer) -> None:
        silent, other = links(balancer, 2)
        put(other, 5)
        pauses = []
        now = 0.0
        for _ in range(3):
            silent.late_since = now
            now += SILENT_S
            assert balancer.to_eject(now) == [silent]
            start = now
            while balancer.choose(DEPTH, 10, now) is not silent:
                now += 0.1
            pauses.append(now - start)
        assert pauses[1] > 1.5 * pauses[0]
        assert pauses[2] > 1.5 * pauses[1]

    def test_at_most_half_are_out(self, balancer: LinkBalancer) -> None:
        active = links(balancer, 4)
        for link in active:
            link.late_since = 0.0
        assert len(balancer.to_eject(SILENT_S)) == 2

    def test_never_the_only_one(self, balancer: LinkBalancer) -> None:
        (only,) = links(balancer, 1)
        only.late_since = 0.0
        assert balancer.to_eject(100.0) == []
        assert balancer.choose(DEPTH, 10, 100.0) is only


class TestMoves:
    def test_a_worker_that_became_slow_hands_half_over(self, balancer: LinkBalancer) -> None:
        slow, fast = links(balancer, 2)
        answers(slow, 0.020)
        answers(fast, 0.002)
        sequences = put(slow, 4)
        assert balancer.to_move(DEPTH, 1.0) == sequences[:2]

    def test_what_was_moved_stays(self, balancer: LinkBalancer) -> None:
        slow, fast = links(balancer, 2)
        answers(slow, 0.020)
        answers(fast, 0.002)
        (sequence,) = put(slow)
        assert balancer.to_move(DEPTH, 1.0) == [sequence]
        assert balancer.to_move(DEPTH, 3.0) == []

    def test_small_differences_move_nothing(self, balancer: LinkBalancer) -> None:
        active = links(balancer, 2)
        answers(active[0], 0.003)
        answers(active[1], 0.002)
        put(active[0], 4)
        for now in range(1, 10):
            assert balancer.to_move(DEPTH, float(now)) == []

    def test_nothing_moves_to_a_worker_that_nothing_is_known_of(self, balancer: LinkBalancer) -> None:
        slow, _ = links(balancer, 2)
        answers(slow, 0.020)
        put(slow, 4)
        assert balancer.to_move(DEPTH, 1.0) == []
