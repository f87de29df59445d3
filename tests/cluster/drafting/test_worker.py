"""The draft worker's real loop and thread, around a drafter whose every step the test lets through: rounds and ends."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from cluster.drafting.worker import DraftWorker
from cluster.speculation.params import SamplingParams
from cluster.wire.messages import Advance, Proposal, SpeculateReply, SpeculateRequest
from tests.waiting import wait_until

from .scripted import WAIT_S, WINDOW, K, Link, ScriptedDrafter, drafts, opening, proposal


class TestRounds:
    def test_an_opening_owes_a_proposal(self, drafter: ScriptedDrafter, link: Link) -> None:
        link.open(7)
        assert [drafter.step() for _ in range(K)] == [[7]] * K
        assert link.reply() == proposal(7, base=2)

    def test_a_request_that_arrives_during_the_sending_was_held_for_no_time(self) -> None:
        """A negative time cannot be written."""
        drafter = ScriptedDrafter()
        drafter.let_all()
        worker = DraftWorker(drafter)
        replies: list[SpeculateReply] = []

        def deliver_slowly(reply: SpeculateReply) -> None:
            replies.append(reply)
            for number in links:
                worker.receive(number, SpeculateRequest())

        links = [worker.attach(deliver_slowly), worker.attach(deliver_slowly)]
        for number in links:
            worker.receive(number, SpeculateRequest(opens={7: opening(7)}))
        while worker.has_work:
            worker.step()
        assert len(replies) == 2
        assert all(reply.timing is not None and reply.timing.held_seconds >= 0.0 for reply in replies)

    def test_run_ahead_that_came_true_is_proposed_without_a_step(self, drafter: ScriptedDrafter, link: Link) -> None:
        link.open(7)
        for _ in range(K + 3):
            drafter.step()
        assert link.reply() == proposal(7, base=2)
        drafter.next_step()  # the last token of the next proposal
        link.advance(7, 2, *drafts(7, 2, K + 1))
        drafter.let()
        assert link.reply() == proposal(7, base=2 + K + 1)
        assert drafter.next_step() == [7]  # running ahead again, after the answer
        assert drafter.rewinds == [(7, K + 4)]  # nothing was thrown away

    def test_a_rejected_draft_is_rolled_back_and_drafted_again(self, drafter: ScriptedDrafter, link: Link) -> None:
        link.open(7)
        for _ in range(K + 1):
            drafter.step()
        assert link.reply() == proposal(7, base=2)
        drafter.next_step()
        link.advance(7, 2, 702, 999)  # the second draft was wrong
        drafter.let()
        for _ in range(K):
            drafter.step()
        assert link.reply() == proposal(7, base=4)
        assert drafter.rewinds == [(7, 1)]

    def test_what_became_of_drafts_is_counted(self, worker: DraftWorker, drafter: ScriptedDrafter, link: Link) -> None:
        link.open(7)
        for _ in range(K + 1):
            drafter.step()
        assert link.reply() == proposal(7, base=2)
        drafter.next_step()
        link.advance(7, 2, 702, 999)  # the second draft was wrong: of K + 2 one came true
        drafter.let()
        for _ in range(K):
            drafter.step()
        assert link.reply() == proposal(7, base=4)
        counted = {r.labels["outcome"]: r.value for r in worker.readings() if r.name == "outrider_draft_tokens"}
        assert counted == {"committed": 1, "wasted": K + 1}

    def test_k_may_change_from_round_to_round(self, drafter: ScriptedDrafter, link: Link) -> None:
        link.open(7)
        drafter.let_all()
        assert link.reply() == proposal(7, base=2)
        link.advance(7, 2, 702, k=1)
        assert link.reply() == proposal(7, base=3, count=1)
        link.advance(7, 2, 702, 703, k=WINDOW + 2)  # more than the window is owed all the same
        assert link.reply() == proposal(7, base=4, count=WINDOW + 2)

    def test_messages_that_arrive_together_are_answered_together(self, drafter: ScriptedDrafter, link: Link) -> None:
        link.open(1, 2, 3)
        for _ in range(K):
            assert drafter.step() == [1, 2, 3]
        expected = {wire_id: Proposal(wire_id, 2, drafts(wire_id, 2, K)) for wire_id in (1, 2, 3)}
        assert link.reply() == SpeculateReply(proposals=expected)
        assert drafter.next_step() == [1, 2, 3]  # running ahead
        for wire_id in (1, 2, 3):
            link.advance(wire_id, 2, 100 * wire_id + 2)
        drafter.let()
        assert link.reply().proposals.keys() == {1, 2, 3}
        drafter.let_all()
        assert link.replies.empty()

    def test_the_latest_news_stand_for_those_they_overtook(self, drafter: ScriptedDrafter, link: Link) -> None:
        link.open(7)
        for _ in range(K):
            drafter.step()
        assert link.reply() == proposal(7, base=2)
        drafter.next_step()
        link.advance(7, 2, 702)
        link.advance(7, 2, 702, 703)
        link.advance(7, 2, 702, 703, 704, 705)
        drafter.let_all()
        assert link.reply() == proposal(7, base=6)
        wait_until(lambda: len(drafter.held[0].token_ids) == 6 + WINDOW, WAIT_S)
        assert link.replies.empty()

    def test_news_older_than_what_is_known_change_nothing(self, drafter: ScriptedDrafter, link: Link) -> None:
        link.open(7, length=6)
        drafter.let_all()
        assert link.reply() == proposal(7, base=6)
        link.advance(7, 2, 9, 9)
        link.advance(7, 6, 706)
        assert link.reply() == proposal(7, base=7)
        assert drafter.rewinds[0][0] == 7
        assert len(drafter.rewinds) == 1


class TestSequencesThatAreNotHeld:
    def test_news_of_an_unknown_sequence_say_that_it_is_lost(self, link: Link) -> None:
        link.advance(7, 2, 702)
        assert link.reply() == SpeculateReply(lost={7})

    def test_news_beyond_any_length_that_is_drafted_for_lose_the_sequence(
        self, drafter: ScriptedDrafter, link: Link
    ) -> None:
        drafter.let_all()
        link.open(7)
        assert link.reply() == proposal(7, base=2)
        link.advance(7, 2, *[1] * 2000)  # longer than the draft's context: kept, for a target with a longer one
        assert link.reply() == proposal(7, base=2002, count=0)
        link.advance(7, 2, *[1] * 16_000)
        assert link.reply() == SpeculateReply(lost={7})
        assert drafter.held == []

    def test_news_whose_base_was_never_told_lose_the_sequence(self, drafter: ScriptedDrafter, link: Link) -> None:
        drafter.let_all()
        link.open(7)
        assert link.reply() == proposal(7, base=2)
        link.advance(7, 5, 705)  # tokens 2 to 4 were never told, although they may have been drafted
        assert link.reply() == SpeculateReply(lost={7})
        assert drafter.held == []

    def test_an_opening_without_room_is_refused(self, drafter: ScriptedDrafter, link: Link) -> None:
        drafter.capacity = 1
        drafter.let_all()
        link.open(1, 2)
        assert link.reply() == SpeculateReply(refused={2})
        assert link.reply() == proposal(1, base=2)

    def test_a_sequence_that_is_closed_makes_room_for_one_opened_in_the_same_message(
        self, drafter: ScriptedDrafter, worker: DraftWorker, link: Link
    ) -> None:
        drafter.capacity = 1
        drafter.let_all()
        link.open(1)
        assert link.reply() == proposal(1, base=2)
        worker.receive(link.number, SpeculateRequest(opens={2: opening(2)}, closes={1}))
        assert link.reply() == proposal(2, base=2)

    def test_an_opening_with_its_advance_is_refused_once(
        self, drafter: ScriptedDrafter, worker: DraftWorker, link: Link
    ) -> None:
        drafter.capacity = 0
        request = SpeculateRequest(opens={7: opening(7)}, advances={7: Advance(7, 2, [702], K)})
        worker.receive(link.number, request)
        assert link.reply() == SpeculateReply(refused={7})

    def test_a_sequence_that_cannot_grow_is_given_up(self, drafter: ScriptedDrafter, link: Link) -> None:
        drafter.let_all()
        drafter.without_room = {1}
        link.open(1, 2)
        assert link.reply() == SpeculateReply(refused={1})
        assert link.reply() == proposal(2, base=2)
        assert drafter.wire_ids == {2}

    def test_tokens_that_the_draft_lacks_are_refused(
        self, drafter: ScriptedDrafter, worker: DraftWorker, link: Link
    ) -> None:
        """A target with the same tokenizer may have a larger, padded vocabulary."""
        drafter.vocab_size = 1000
        link.open(1000)
        assert link.reply() == SpeculateReply(refused={1000})
        biased = replace(opening(3), params=SamplingParams(logit_bias=((1, 1.0), (1000, 5.0))))
        worker.receive(link.number, SpeculateRequest(opens={3: biased}))
        assert link.reply() == SpeculateReply(refused={3})
        link.open(999)
        assert drafter.next_step() == [999]

    def test_a_sequence_that_goes_beyond_the_drafts_vocabulary_is_lost(
        self, drafter: ScriptedDrafter, link: Link
    ) -> None:
        drafter.vocab_size = 1000
        drafter.let_all()
        link.open(1, 2)
        assert link.reply().proposals.keys() == {1, 2}
        link.advance(1, 2, 102, 1000)
        assert link.reply() == SpeculateReply(lost={1})
        assert drafter.wire_ids == {2}

    def test_opening_again_replaces_what_was_there(self, drafter: ScriptedDrafter, link: Link) -> None:
        drafter.let_all()
        link.open(7)
        assert link.reply() == proposal(7, base=2)
        link.open(7, length=5)
        assert link.reply() == proposal(7, base=5)
        assert len(drafter.held) == 1


class TestEnds:
    def test_a_closed_sequence_is_released(self, drafter: ScriptedDrafter, worker: DraftWorker, link: Link) -> None:
        drafter.let_all()
        link.open(1, 2)
        assert link.reply().proposals.keys() == {1, 2}
        link.close(1, 99)
        wait_until(lambda: drafter.wire_ids == {2}, WAIT_S)
        assert worker.num_sequences == 1
        link.advance(1, 2, 102)
        assert link.reply() == SpeculateReply(lost={1})

    def test_an_opening_closed_in_the_same_message_leaves_nothing(
        self, drafter: ScriptedDrafter, worker: DraftWorker, link: Link
    ) -> None:
        worker.receive(link.number, SpeculateRequest(opens={7: opening(7)}, closes={7}))
        link.open(8)
        assert drafter.next_step() == [8]
        assert drafter.wire_ids == {8}

    def test_a_link_that_is_gone_takes_its_sequences_with_it(
        self, drafter: ScriptedDrafter, worker: DraftWorker, link: Link
    ) -> None:
        other = Link(worker)
        link.open(1, 2)
        drafter.next_step()
        other.open(1, 3)
        drafter.let_all()
        assert link.reply().proposals.keys() == {1, 2}
        assert other.reply().proposals.keys() == {1, 3}
        link.detach()
        wait_until(lambda: worker.num_sequences == 2, WAIT_S)
        assert drafter.wire_ids == {1, 3}
        other.advance(1, 2, 102)
        assert other.reply() == proposal(1, base=3)
        assert link.replies.empty()

    def test_links_may_use_the_same_numbers(self, drafter: ScriptedDrafter, worker: DraftWorker, link: Link) -> None:
        other = Link(worker)
        drafter.let_all()
        link.open(7, length=2)
        other.open(7, length=5)
        assert link.reply() == proposal(7, base=2)
        assert other.reply() == proposal(7, base=5)
        other.advance(7, 5, 9)
        assert other.reply() == proposal(7, base=6)
        other.close(7)
        wait_until(lambda: worker.num_sequences == 1, WAIT_S)
        link.advance(7, 2, 702)
        assert link.reply() == proposal(7, base=3)

    def test_a_drafter_that_fails_ends_the_loop_and_says_why(
        self, drafter: ScriptedDrafter, worker: DraftWorker, link: Link
    ) -> None:
        drafter.failure = RuntimeError("out of luck")
        link.open(7)
        drafter.step()
        wait_until(lambda: worker.error is not None, WAIT_S)
        assert worker.error is drafter.failure


class TestNewSequences:
    def test_their_prompts_are_in_no_step_that_others_wait_for(self, drafter: ScriptedDrafter, link: Link) -> None:
        link.open(1)
        for _ in range(K):
            drafter.step()
        assert link.reply() == proposal(1, base=2)
        drafter.next_step()
        link.advance(1, 2, 999)
        link.open(2)
        drafter.let()
        assert [drafter.step() for _ in range(K)] == [[1]] * K
        assert link.reply() == proposal(1, base=3)
        assert drafter.step() == [2]

    def test_they_have_their_turn_where_others_are_always_waited_for(
        self, drafter: ScriptedDrafter, link: Link
    ) -> None:
        link.open(1)
        for _ in range(K):
            drafter.step()
        link.reply()
        drafter.next_step()
        link.advance(1, 2, 999, k=100)
        link.open(2)
        drafter.let()
        steps = [drafter.step() for _ in range(20)]
        assert steps[:16] == [[1]] * 16
        assert steps[16] == [1, 2]

    def test_one_whose_prompt_is_computed_waits_for_no_other_prompt(self, drafter: ScriptedDrafter, link: Link) -> None:
        drafter.prompt_steps[2] = 5
        link.open(1, 2)
        assert [drafter.step() for _ in range(K)] == [[1, 2], *[[1]] * (K - 1)]
        assert link.reply() == proposal(1, base=2)

    @pytest.mark.parametrize(
        ("k", "rows", "told"), [(1, 2, (1, 2, True)), (2, 1, (1, 1, False)), (1, None, (1, 1, True))]
    )
    def test_a_reply_tells_the_rows_of_its_last_step(
        self, drafter: ScriptedDrafter, link: Link, k: int, rows: int | None, told: tuple[int, int, bool]
    ) -> None:
        drafter.num_step_rows = rows
        link.open(1, k=1)
        drafter.step()
        link.reply()  # its only step had the prompt
        drafter.next_step()
        link.advance(1, 2, 999, k=k)  # the draft was wrong
        drafter.let()
        for _ in range(k):
            drafter.step()
        timing = link.reply().timing
        assert timing is not None
        assert (timing.batch, timing.rows, timing.is_first) == told

    def test_steps_with_prompts_say_nothing_of_what_a_round_takes(self, drafter: ScriptedDrafter, link: Link) -> None:
        drafter.prompt_steps[1] = 2
        link.open(1, k=1)
        for _ in range(2):
            drafter.next_step()
            time.sleep(0.2)
            drafter.let()
        drafter.step()
        timing = link.reply().timing
        assert timing is not None
        assert timing.step_seconds < 0.1

    def test_nor_do_steps_that_make_up_for_several_rounds(self, drafter: ScriptedDrafter, link: Link) -> None:
        link.open(1, k=1)
        drafter.step()
        link.reply()
        drafter.next_step()
        link.advance(1, 2, 901, 902, 903, 904, k=1)
        drafter.let()
        assert drafter.next_step() == [1]
        time.sleep(0.2)
        drafter.let()
        reply = link.reply()
        assert reply.proposals
        assert reply.timing is not None
        assert reply.timing.step_seconds < 0.1
