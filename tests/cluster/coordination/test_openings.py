"""Tests of the assignment of sequences to draft workers, as links come and go and workers refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cluster.coordination.base import LinkState
from cluster.coordination.coordinator import Coordinator
from cluster.coordination.sequence import Round
from cluster.speculation.drafts import Drafts
from cluster.wire.messages import Proposal, SpeculateReply, SpeculateRequest

from .scripted import PROMPT, Rounds, ScriptedLink, ScriptedPool, new_sequence


class TestPreemption:
    """The engine takes a sequence's blocks for a while: it is not waited for, and then opened again."""

    def test_it_stays_open_and_opening_it_again_changes_nothing(self, rounds: Rounds) -> None:
        rounds.coordinator.begin((), [rounds.sequence])
        assert rounds.link.sent == []

    def test_what_was_proposed_meanwhile_is_verified_afterwards(self, rounds: Rounds, pool: ScriptedPool) -> None:
        rounds.proposes(3, 4, 5, 6, 7)
        assert rounds.drafts() == [4, 5, 6, 7]
        rounds.commits(9)
        rounds.proposes(4, 10, 11, 12, 13, after=0.01)
        pool.now += 60.0
        rounds.coordinator.begin(())  # of other sequences' steps
        rounds.coordinator.begin((), [rounds.sequence])
        assert rounds.drafts() == [10, 11, 12, 13]
        assert rounds.coordinator.stats.num_late_rounds == 0

    def test_its_link_may_go_down_meanwhile(
        self, rounds: Rounds, pool: ScriptedPool, new_link: Callable[[str], ScriptedLink]
    ) -> None:
        second = new_link("second")
        pool.happens(rounds.link, LinkState.DOWN)
        rounds.coordinator.begin(())
        rounds.coordinator.begin((), [rounds.sequence])
        assert [len(request.opens) for request in second.take_sent()] == [1]

    def test_what_never_came_is_not_waited_for_once_more(self, rounds: Rounds, pool: ScriptedPool) -> None:
        rounds.commits(9)
        pool.now += 60.0
        rounds.coordinator.begin((), [rounds.sequence])
        assert rounds.drafts() == []
        assert pool.now == pytest.approx(160.0)

    def test_it_can_be_closed_meanwhile(self, rounds: Rounds) -> None:
        rounds.coordinator.close(rounds.sequence)
        rounds.coordinator.begin(())
        assert rounds.link.take_sent() == [SpeculateRequest(closes={rounds.sequence.wire_id})]


class TestLinks:
    def test_without_a_link_a_sequence_waits_for_nothing(self, coordinator: Coordinator, pool: ScriptedPool) -> None:
        sequence = new_sequence()
        assert coordinator.begin([sequence]) == {sequence: Drafts()}
        coordinator.end([Round(sequence)])
        assert pool.now == 100.0

    def test_a_link_that_came_up_while_nothing_ran_takes_the_first_sequence_at_once(
        self, coordinator: Coordinator, link: ScriptedLink
    ) -> None:
        coordinator.begin((), [new_sequence()])
        assert len(link.take_sent()) == 1

    def test_sequences_go_where_the_fewest_are(
        self, coordinator: Coordinator, new_link: Callable[[str], ScriptedLink]
    ) -> None:
        first, second = new_link("first"), new_link("second")
        coordinator.begin((), [new_sequence() for _ in range(5)])
        assert sorted([len(first.sent[0].opens), len(second.sent[0].opens)]) == [2, 3]

    def test_when_a_link_goes_down_its_sequences_open_elsewhere_with_all_their_tokens(
        self, coordinator: Coordinator, pool: ScriptedPool, rounds: Rounds, new_link: Callable[[str], ScriptedLink]
    ) -> None:
        rounds.proposes(3, 4, 5, 6, 7)
        assert rounds.drafts() == [4, 5, 6, 7]
        rounds.commits(4, 5, 9)
        second = new_link("second")
        pool.happens(rounds.link, LinkState.DOWN, after=0.01)
        assert rounds.drafts() == []  # and decodes plainly, as soon as it is known
        assert pool.now == pytest.approx(100.01)
        assert rounds.commits(10) == []  # nothing on the link that is down
        ((opening,),) = [request.opens.values() for request in second.take_sent()]
        assert opening.token_ids == [*PROMPT, 4, 5, 9, 10]
        assert opening.num_prompt_tokens == 3
        rounds.link = second
        rounds.proposes(7, 11, 12, 13, 14)
        assert rounds.drafts() == [11, 12, 13, 14]
        assert coordinator.stats.num_late_rounds == 0

    def test_a_link_that_comes_back_gets_its_sequences_anew(
        self, pool: ScriptedPool, rounds: Rounds, coordinator: Coordinator
    ) -> None:
        old_id = rounds.sequence.wire_id
        pool.happens(rounds.link, LinkState.DOWN)
        coordinator.begin(())
        pool.happens(rounds.link, LinkState.UP)
        (request,) = rounds.commits(4)
        assert request.advances == {}
        (opening,) = request.opens.values()
        assert opening.token_ids == [*PROMPT, 4]
        assert opening.wire_id != old_id

    def test_replies_of_a_link_that_is_down_are_ignored(self, pool: ScriptedPool, rounds: Rounds) -> None:
        pool.happens(rounds.link, LinkState.DOWN)
        rounds.proposes(3, 4, 5, 6, 7)
        assert rounds.drafts() == []

    def test_a_sequence_can_be_closed_while_it_has_no_link(
        self, coordinator: Coordinator, pool: ScriptedPool, rounds: Rounds, new_link: Callable[[str], ScriptedLink]
    ) -> None:
        pool.happens(rounds.link, LinkState.DOWN)
        assert rounds.drafts() == []
        coordinator.close(rounds.sequence)
        second = new_link("second")
        coordinator.begin(())
        assert second.sent == []


class TestRefusals:
    @pytest.mark.parametrize("kind", ["refuses", "loses"])
    def test_a_sequence_that_is_not_held_opens_again_after_a_pause(
        self, kind: str, rounds: Rounds, pool: ScriptedPool
    ) -> None:
        getattr(rounds, kind)()
        assert rounds.drafts() == []
        assert pool.now == 100.0  # nobody is waited for
        assert rounds.commits(4) == []
        pool.now += 0.9
        assert rounds.commits(5) == []
        pool.now += 0.2
        (request,) = rounds.commits(6)
        (opening,) = request.opens.values()
        assert opening.token_ids == [*PROMPT, 4, 5, 6]
        stats = rounds.coordinator.stats
        assert (stats.num_refused, stats.num_lost) == ((1, 0) if kind == "refuses" else (0, 1))

    def test_every_refusal_doubles_the_pause(self, rounds: Rounds, pool: ScriptedPool) -> None:
        pauses = []
        for _ in range(9):
            rounds.refuses()
            rounds.coordinator.begin(())
            refused_at = pool.now
            while not rounds.commits(4):
                pool.now += 0.25
            pauses.append(round(pool.now - refused_at))
        assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]

    def test_what_is_said_of_an_earlier_opening_is_ignored(self, rounds: Rounds, pool: ScriptedPool) -> None:
        """An advance crossed with the refusal and was answered, late, with `lost`."""
        old_id = rounds.sequence.wire_id
        rounds.refuses()
        rounds.drafts()
        pool.now += 1.1
        assert len(rounds.commits(4)) == 1
        pool.happens(rounds.link, SpeculateReply(lost={old_id}))
        pool.happens(rounds.link, SpeculateReply(proposals={old_id: Proposal(old_id, 3, [4, 5])}))
        rounds.proposes(4, 6, 7, 8, 9)
        assert rounds.drafts() == [6, 7, 8, 9]
        assert rounds.coordinator.stats.num_lost == 0

    def test_the_others_go_on(self, coordinator: Coordinator, pool: ScriptedPool, rounds: Rounds) -> None:
        other = new_sequence()
        coordinator.begin((), [other])
        reply = SpeculateReply(
            proposals={other.wire_id: Proposal(other.wire_id, 3, [7])}, refused={rounds.sequence.wire_id}
        )
        pool.happens(rounds.link, reply)
        assert coordinator.begin([rounds.sequence, other]) == {rounds.sequence: Drafts(), other: Drafts([7])}

    def test_nobody_waits_for_what_a_worker_says_that_refused_before(self, rounds: Rounds, pool: ScriptedPool) -> None:
        rounds.refuses()
        assert rounds.drafts() == []
        pool.now += 1.0
        (request,) = rounds.commits(4)
        assert list(request.opens) == [rounds.sequence.wire_id]
        asked_at = pool.now
        assert rounds.drafts() == []
        assert pool.now == asked_at
        rounds.proposes(4, 5, 6, 7, 8)
        assert rounds.drafts() == [5, 6, 7, 8]


def test_an_opening_takes_the_credit_of_what_the_draft_reads(
    coordinator: Coordinator, pool: ScriptedPool, link: ScriptedLink, rounds: Rounds
) -> None:
    wire_id = rounds.sequence.wire_id
    proposals = {wire_id: Proposal(wire_id, 3, [7])}
    pool.happens(link, SpeculateReply(proposals=proposals, credit=1000, max_tokens_read=2))
    newcomer = new_sequence()
    assert len(newcomer.token_ids) > 2
    coordinator.begin((), [newcomer])
    assert newcomer.link is not None
    assert newcomer.link.credit == 1000 - 2 - newcomer.window


def test_nothing_is_opened_beyond_a_workers_credit(
    coordinator: Coordinator, pool: ScriptedPool, link: ScriptedLink, rounds: Rounds
) -> None:
    wire_id = rounds.sequence.wire_id
    pool.happens(link, SpeculateReply(proposals={wire_id: Proposal(wire_id, 3, [7])}, credit=5))
    newcomer = new_sequence()
    coordinator.begin((), [newcomer])
    assert link.take_sent() == []
    assert coordinator.stats.num_without_credit == 1
    coordinator.close(rounds.sequence)  # makes room, how much is not known
    pool.now += 1.0
    coordinator.begin(())
    (request,) = link.take_sent()
    assert list(request.opens) == [newcomer.wire_id]


class TestDeaths:
    """A worker that dies of a sequence takes its opening with it, and the next one gets it."""

    def dies(self, coordinator: Coordinator, pool: ScriptedPool, link: ScriptedLink) -> None:
        pool.happens(link, LinkState.DOWN)
        coordinator.begin(())

    def test_a_sequence_that_two_workers_died_of_is_not_opened_again(
        self, rounds: Rounds, pool: ScriptedPool, new_link: Callable[[str], ScriptedLink]
    ) -> None:
        """The first has answered, so that it did not die of it."""
        rounds.proposes(3, 4, 5, 6, 7)
        rounds.drafts()
        self.dies(rounds.coordinator, pool, rounds.link)
        for name in ("second", "third"):
            link = new_link(name)
            rounds.coordinator.begin((), [rounds.sequence])
            assert [len(request.opens) for request in link.take_sent()] == [1]
            self.dies(rounds.coordinator, pool, link)
        fourth = new_link("fourth")
        rounds.coordinator.begin((), [rounds.sequence])
        assert fourth.take_sent() == []
        assert rounds.coordinator.stats.num_given_up == 1
        rounds.coordinator.close(rounds.sequence)

    def test_one_that_was_answered_in_between_is(
        self, rounds: Rounds, pool: ScriptedPool, new_link: Callable[[str], ScriptedLink]
    ) -> None:
        self.dies(rounds.coordinator, pool, rounds.link)
        for name in ("second", "third"):
            link = new_link(name)
            rounds.coordinator.begin((), [rounds.sequence])
            (request,) = link.take_sent()
            (wire_id,) = request.opens
            if name == "second":
                pool.happens(link, SpeculateReply(proposals={wire_id: Proposal(wire_id, 3, [4, 5, 6, 7])}))
                rounds.coordinator.begin(())
            self.dies(rounds.coordinator, pool, link)
        fourth = new_link("fourth")
        rounds.coordinator.begin((), [rounds.sequence])
        assert [len(request.opens) for request in fourth.take_sent()] == [1]
