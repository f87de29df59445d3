"""Sequences go to the draft workers that are worth most to them, leave those that fail, and do not wander."""

from __future__ import annotations

import itertools
from typing import cast

import pytest

from cluster.config.speculation import SpeculationConfig
from cluster.coordination.balancer import LinkBalancer
from cluster.coordination.depths import DepthPlanner
from cluster.coordination.link import DraftLink
from cluster.coordination.link_value import LinkValue
from cluster.coordination.sequence import ActiveLink, SpeculativeSequence
from cluster.coordination.stats import CoordinatorStats
from cluster.speculation.costs import DraftStep
from cluster.wire.messages import Proposal

from .scripted import new_sequence

TIMEOUT_S = 0.05
SILENT_S = 10 * TIMEOUT_S
STEP_S = 0.020
numbers = itertools.count(1)


class Pool:
    """A balancer, and draft workers whose ways and models are the test's."""

    def __init__(self, trial_share: float = 0.0) -> None:
        self.planner = DepthPlanner(SpeculationConfig(), 64)
        for rows in (1, 64):
            self.planner.steps.curve.observe(rows, STEP_S)
        self.balancer = LinkBalancer(64, TIMEOUT_S, LinkValue(self.planner), trial_share)

    def link(
        self,
        seconds: float | None = None,
        model: str = "draft",
        expected_round_trip: float | None = None,
        address: str = "a",
    ) -> ActiveLink:
        """Adds a link with a round trip of `seconds`. None: nothing is known of it."""
        link = DraftLink(address, "fingerprint", lambda _: None, expected_round_trip)
        link.model = model
        self.balancer.add(link)
        active = self.balancer.active[link]
        if seconds is not None:
            answers(active, seconds)
        return active

    def accepts(self, model: str, rate: float) -> None:
        for number in range(400):
            self.planner.rates(model, 1.0).observe(1, int(number % 10 < 10 * rate))

    def choose(self, num_tokens: int = 10, now: float = 0.0) -> ActiveLink | None:
        return self.balancer.choose(new_sequence(), num_tokens, 0, now)

    def open(self, count: int, now: float = 0.0) -> list[SpeculativeSequence]:
        """Opens `count` sequences on the links that the balancer chooses."""
        sequences = [new_sequence() for _ in range(count)]
        for sequence in sequences:
            self.open_one(sequence, now)
        return sequences

    def open_one(self, sequence: SpeculativeSequence, now: float) -> ActiveLink:
        link = self.balancer.choose(sequence, 10, 0, now)
        assert link is not None
        sequence.opened(link, next(numbers))
        return link

    def move(self, now: float) -> int:
        """Those that are to move do; how many."""
        moved = self.balancer.to_move(now)
        for sequence in moved:
            sequence.detached()
            self.open_one(sequence, now)
        return len(moved)


def put(link: ActiveLink, count: int = 1) -> list[SpeculativeSequence]:
    sequences = [new_sequence() for _ in range(count)]
    for sequence in sequences:
        sequence.opened(link, next(numbers))
    return sequences


def answers(link: ActiveLink, seconds: float, repeats: int = 60) -> None:
    """Observes replies that take `seconds`, nearly all of it in the network."""
    for _ in range(repeats):
        link.costs.observe_reply(seconds, DraftStep(1e-6, 1, 1))


@pytest.fixture
def pool() -> Pool:
    return Pool()


class TestChoice:
    def test_none_while_no_link_is_up(self, pool: Pool) -> None:
        assert pool.choose() is None

    def test_alike_workers_share_evenly(self, pool: Pool) -> None:
        active = [pool.link(0.002) for _ in range(3)]
        pool.open(9)
        assert [len(link.sequences) for link in active] == [3, 3, 3]

    def test_of_alike_workers_a_conversation_keeps_one_whichever_target_asks(self) -> None:
        pools = [Pool(), Pool()]
        for pool, order in zip(pools, (range(4), range(3, -1, -1)), strict=True):
            for number in order:
                pool.link(0.001, address=f"10.0.0.{number}:7000")
        chosen = []
        for number in range(40):
            sequence = new_sequence()
            sequence.conversation = b"%d" % number
            links = [pool.balancer.choose(sequence, 10, 0, 0.0) for pool in pools]
            addresses = {link.link.address for link in links if link is not None}
            assert len(addresses) == 1
            chosen += addresses
        assert len(set(chosen)) == 4

    def test_one_conversation_does_not_fill_one_worker(self, pool: Pool) -> None:
        links = [pool.link(0.001, address=f"10.0.0.{number}:7000") for number in range(4)]
        for number in range(64):
            sequence = new_sequence()
            sequence.conversation = b"one"
            pool.open_one(sequence, 0.0)
            assert max(len(link.sequences) for link in links) <= 1.5 * (number + 1) / 4 + 1

    def test_the_nearer_one_is_preferred(self, pool: Pool) -> None:
        near, _ = pool.link(0.001), pool.link(0.020)
        put(near, 5)
        assert pool.choose() is near

    def test_the_better_draft_is_preferred(self, pool: Pool) -> None:
        better, worse = pool.link(0.004, "better"), pool.link(0.002, "worse")
        pool.accepts("better", 0.9)
        pool.accepts("worse", 0.5)
        put(better, 5)
        assert pool.choose() is better
        assert worse.sequences == {}

    def test_a_draft_that_is_measured_at_one_temperature_is_not_new_at_another(self, pool: Pool) -> None:
        worse, better = pool.link(0.0005, "worse"), pool.link(0.0005, "better")
        pool.accepts("worse", 0.3)
        put(better)
        assert pool.choose() is worse  # one sequence at a time while nothing is known of it
        for _ in range(100):
            pool.planner.rates("better", 0.0).observe(1, 1)
        assert pool.choose() is better

    def test_a_better_draft_that_is_too_far_is_not(self, pool: Pool) -> None:
        better, worse = pool.link(0.045, "better"), pool.link(0.001, "worse")
        pool.accepts("better", 0.8)
        pool.accepts("worse", 0.7)
        put(worse, 5)
        assert pool.choose() is worse
        assert better.sequences == {}

    def test_an_unknown_one_gets_its_chance_but_not_everything(self, pool: Pool) -> None:
        known, unknown = pool.link(0.001), pool.link()
        put(known)
        assert pool.choose() is unknown
        put(unknown, 2)
        assert pool.choose() is known

    def test_one_without_room_is_passed_over(self, pool: Pool) -> None:
        full, other = pool.link(), pool.link()
        full.credit = 9
        put(other, 5)
        assert pool.choose() is other
        other.credit = 0
        assert pool.choose() is None
        full.credit = 10
        assert pool.choose() is full

    def test_only_tokens_that_a_draft_reads_need_room(self, pool: Pool) -> None:
        link = pool.link()
        link.credit, link.max_tokens_read = 8, 6
        assert pool.balancer.choose(new_sequence(), 1000, 2, 0.0) is link
        assert pool.balancer.choose(new_sequence(), 1000, 3, 0.0) is None
        assert pool.balancer.choose(new_sequence(), 4, 4, 0.0) is link


class TestPlaces:
    NEAR, FAR = 0.0002, 0.020

    def test_before_anything_is_measured_the_place_decides(self, pool: Pool) -> None:
        near, _ = pool.link(expected_round_trip=self.NEAR), pool.link(expected_round_trip=self.FAR)
        assert pool.choose() is near

    def test_labels_that_are_wrong_lose_to_what_is_measured(self, pool: Pool) -> None:
        said_near = pool.link(expected_round_trip=self.NEAR)
        said_far = pool.link(expected_round_trip=self.FAR)
        first = pool.open(8)
        assert len(said_near.sequences) == 7  # and one tries the other
        answers(said_near, self.FAR)
        answers(said_far, self.NEAR)
        assert pool.choose() is said_far
        for now in range(10, 40):
            pool.move(float(now))
        assert {sequence.link for sequence in first} == {said_far}

    def test_who_is_back_gets_its_sequences_back_once(self, pool: Pool) -> None:
        far = pool.link(self.FAR, expected_round_trip=self.FAR)
        sequences = put(far, 8)
        near = pool.link(expected_round_trip=self.NEAR)
        assert pool.move(1.0) == 1  # to see
        answers(near, self.NEAR)
        moved = [pool.move(float(now)) for now in range(2, 40)]
        assert {sequence.link for sequence in sequences} == {near}
        assert sum(moved) == 7


class TestTrials:
    def test_other_models_get_their_share(self) -> None:
        pool = Pool(trial_share=0.1)
        best, other = pool.link(0.002, "best"), pool.link(0.002, "other")
        pool.accepts("best", 0.9)
        pool.accepts("other", 0.3)
        chosen = []
        for _ in range(100):
            (sequence,) = pool.open(1)
            chosen.append(sequence.link)
            sequence.detached()
        assert chosen.count(other) == pytest.approx(10, abs=1)
        assert chosen.count(best) == 100 - chosen.count(other)

    def test_without_a_share_there_are_none(self, pool: Pool) -> None:
        best, _ = pool.link(0.002, "best"), pool.link(0.002, "other")
        pool.accepts("best", 0.9)
        pool.accepts("other", 0.3)
        pool.open(100)
        assert len(best.sequences) == 100

    def test_where_none_come_one_moves_there_and_back(self) -> None:
        pool = Pool(trial_share=0.1)
        best, other = pool.link(0.002, "best"), pool.link(0.002, "other")
        pool.accepts("best", 0.9)
        pool.accepts("other", 0.3)
        put(best, 8)
        on_trial = []
        for now in range(1, 200):
            pool.move(float(now))
            on_trial.append(len(other.sequences))
        assert set(on_trial) == {0, 1}
        assert sum(on_trial) / len(on_trial) == pytest.approx(0.1 * 8, rel=0.5)

    def test_of_workers_with_one_model_none_is_tried_for_its_own_sake(self) -> None:
        pool = Pool(trial_share=0.5)
        near, _ = pool.link(0.001), pool.link(0.020)
        pool.open(20)
        assert len(near.sequences) == 20


class TestEjection:
    def test_a_silent_worker_is_ejected(self, pool: Pool) -> None:
        silent, other = pool.link(), pool.link()
        silent.late_since = 1.0
        assert pool.balancer.to_eject(1.0 + TIMEOUT_S) == []
        assert pool.balancer.to_eject(1.0 + SILENT_S) == [silent]
        assert pool.choose(now=1.0 + SILENT_S) is other
        assert pool.balancer.num_ejections == 1

    def test_it_comes_back_after_a_pause_that_grows(self, pool: Pool) -> None:
        silent, other = pool.link(), pool.link()
        put(other, 5)
        pauses = []
        now = 0.0
        for _ in range(3):
            silent.late_since = now
            now += SILENT_S
            assert pool.balancer.to_eject(now) == [silent]
            start = now
            while pool.choose(now=now) is not silent:
                now += 0.1
            pauses.append(now - start)
        assert pauses[1] > 1.5 * pauses[0]
        assert pauses[2] > 1.5 * pauses[1]

    def test_one_that_never_answers_those_it_was_opened_for_is_ejected(self, pool: Pool) -> None:
        silent, _ = pool.link(), pool.link()
        (sequence,) = put(silent)
        sequence.asked(4, None, 0.0)
        sequence.gave_up()
        assert pool.balancer.to_eject(TIMEOUT_S / 2) == []
        assert pool.balancer.to_eject(TIMEOUT_S) == []
        assert pool.balancer.to_eject(TIMEOUT_S + SILENT_S) == [silent]

    def test_one_that_falls_silent_is_ejected_though_no_step_waits_for_it(self, pool: Pool) -> None:
        silent, _ = pool.link(), pool.link()
        (sequence,) = put(silent)
        sequence.answered(Proposal(sequence.wire_id, 3, (4, 5)), 0.0, CoordinatorStats())
        now = ejected_at = 0.0
        while not ejected_at and now < 2 * (TIMEOUT_S + SILENT_S):
            now += STEP_S
            cast(list[int], sequence.token_ids).append(7)
            sequence.advance(4, None, now)
            if pool.balancer.to_eject(now):
                ejected_at = now
        assert 0.0 < ejected_at <= TIMEOUT_S + SILENT_S + STEP_S

    def test_one_that_owes_nothing_is_not(self, pool: Pool) -> None:
        idle, _ = pool.link(), pool.link()
        (sequence,) = put(idle)
        sequence.answered(Proposal(sequence.wire_id, 3, (4, 5)), 0.0, CoordinatorStats())
        sequence.advance(4, None, 0.1)
        sequence.detached()  # it has ended, and nobody answers for it
        assert pool.balancer.to_eject(0.1 + TIMEOUT_S) == []
        assert pool.balancer.to_eject(100.0) == []

    def test_at_most_half_are_out(self, pool: Pool) -> None:
        for _ in range(4):
            pool.link().late_since = 0.0
        assert len(pool.balancer.to_eject(SILENT_S)) == 2

    def test_never_the_only_one(self, pool: Pool) -> None:
        only = pool.link()
        only.late_since = 0.0
        assert pool.balancer.to_eject(100.0) == []
        assert pool.choose(now=100.0) is only


class TestMoves:
    def test_a_worker_that_became_slow_hands_half_over(self, pool: Pool) -> None:
        slow, _ = pool.link(0.020), pool.link(0.002)
        sequences = put(slow, 4)
        assert pool.balancer.to_move(1.0) == sequences[:2]

    def test_one_whose_drafts_are_accepted_less_does_so_too(self, pool: Pool) -> None:
        worse, _ = pool.link(0.002, "worse"), pool.link(0.002, "better")
        pool.accepts("worse", 0.3)
        pool.accepts("better", 0.9)
        sequences = put(worse, 4)
        assert pool.balancer.to_move(1.0) == sequences[:2]

    def test_what_was_moved_stays(self, pool: Pool) -> None:
        slow, _ = pool.link(0.020), pool.link(0.002)
        (sequence,) = put(slow)
        assert pool.balancer.to_move(1.0) == [sequence]
        assert pool.balancer.to_move(3.0) == []

    def test_small_differences_move_nothing(self, pool: Pool) -> None:
        link, _ = pool.link(0.003), pool.link(0.002)
        put(link, 4)
        for now in range(1, 10):
            assert pool.balancer.to_move(float(now)) == []

    def test_one_sequence_at_most_moves_to_a_worker_that_nothing_is_known_of(self, pool: Pool) -> None:
        slow, unknown = pool.link(0.020), pool.link()
        put(slow, 4)
        assert pool.move(1.0) == 1
        assert len(unknown.sequences) == 1
        assert pool.move(2.0) == 0
