"""The draft worker's real loop and thread, around a drafter whose every step the test lets through."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from cluster.drafters.base import Drafter, DraftSequence
from cluster.drafting.worker import DraftWorker
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.wire.messages import Advance, Open, Proposal, SpeculateReply, SpeculateRequest

WAIT_S = 10.0  # for what must happen
K, WINDOW = 3, 8


class ScriptedDrafter(Drafter):
    """Drafts `100 * first token + index`, at the end of every sequence or where it is told to; steps when it is let.

    A second child is 50 more than the first. A sequence is known by its first token.
    """

    num_used_blocks = 0
    num_blocks = 10

    def __init__(self) -> None:
        self.max_model_len = 1000
        self.vocab_size = 100_000
        self.capacity = 8
        self.held: list[DraftSequence] = []
        self.without_room: set[int] = set()
        self.rewinds: list[tuple[int, int]] = []
        self.failure: Exception | None = None
        self._asked: queue.Queue[list[int]] = queue.Queue()
        self._may_step = threading.Semaphore(0)
        self._is_let_always = False

    def admit(self, sequence: DraftSequence) -> bool:
        if len(self.held) == self.capacity:
            return False
        self.held.append(sequence)
        return True

    def draft(self, sequences: Sequence[DraftSequence]) -> list[DraftSequence]:
        self._asked.put([s.token_ids[0] for s in sequences])
        assert self._is_let_always or self._may_step.acquire(timeout=WAIT_S)
        if self.failure is not None:
            raise self.failure
        assert all(sequence in self.held for sequence in sequences)
        stuck = [s for s in sequences if s.token_ids[0] in self.without_room]
        for sequence in sequences:
            if sequence not in stuck:
                for node in sequence.to_extend or [sequence.tip]:
                    best = 100 * sequence.token_ids[0] + sequence.num_committed + sequence.depth(node)
                    sequence.extend(node, [best, best + 50][: sequence.width], [0.0, 1.0][: sequence.width])
        return stuck

    def rewind(self, sequence: DraftSequence, kept: Sequence[int]) -> None:
        self.rewinds.append((sequence.token_ids[0], len(kept)))

    def release(self, sequence: DraftSequence) -> None:
        self.held.remove(sequence)

    # For the test.

    def next_step(self) -> list[int]:
        """Waits until the loop asks for a step, without letting it through; says of which sequences."""
        return self._asked.get(timeout=WAIT_S)

    def let(self) -> None:
        """Lets the step that was asked for through."""
        self._may_step.release()

    def step(self) -> list[int]:
        wire_ids = self.next_step()
        self.let()
        return wire_ids

    def let_all(self) -> None:
        """From now on nothing waits."""
        self._is_let_always = True
        self._may_step.release()

    @property
    def num_steps_asked(self) -> int:
        return self._asked.qsize()

    @property
    def wire_ids(self) -> set[int]:
        return {sequence.token_ids[0] for sequence in self.held}


class Link:
    """A coordinator's side of a link: what it sends, what it gets."""

    def __init__(self, worker: DraftWorker) -> None:
        self._worker = worker
        self.replies: queue.Queue[SpeculateReply] = queue.Queue()
        self.number = worker.attach(self.replies.put)

    def open(self, *wire_ids: int, k: int = K, length: int = 2, window: int = WINDOW) -> None:
        openings = {wire_id: opening(wire_id, k, length, window) for wire_id in wire_ids}
        self._worker.receive(self.number, SpeculateRequest(opens=openings))

    def advance(self, wire_id: int, base: int, *tokens: int, k: int = K) -> None:
        self._worker.receive(self.number, SpeculateRequest(advances={wire_id: Advance(wire_id, base, tokens, k)}))

    def close(self, *wire_ids: int) -> None:
        self._worker.receive(self.number, SpeculateRequest(closes=set(wire_ids)))

    def reply(self) -> SpeculateReply:
        return self.replies.get(timeout=WAIT_S)

    def detach(self) -> None:
        self._worker.detach(self.number)


def opening(wire_id: int, k: int = K, length: int = 2, window: int = WINDOW) -> Open:
    return Open(wire_id, [wire_id] * length, length, SamplingParams(), NoiseKey(0, 0), k, window)


def drafts(wire_id: int, start: int, count: int) -> list[int]:
    return [100 * wire_id + index for index in range(start, start + count)]


def proposal(wire_id: int, base: int, count: int = K) -> SpeculateReply:
    return SpeculateReply(proposals={wire_id: Proposal(wire_id, base, drafts(wire_id, base, count))})


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.005)


@pytest.fixture
def drafter() -> ScriptedDrafter:
    return ScriptedDrafter()


@pytest.fixture
def worker(drafter: ScriptedDrafter) -> Iterator[DraftWorker]:
    worker = DraftWorker(drafter)
    worker.start()
    yield worker
    drafter.let_all()
    worker.stop()


@pytest.fixture
def link(worker: DraftWorker) -> Link:
    return Link(worker)


class TestRounds:
    def test_an_opening_owes_a_proposal(self, drafter: ScriptedDrafter, link: Link) -> None:
        link.open(7)
        assert [drafter.step() for _ in range(K)] == [[7]] * K
        assert link.reply() == proposal(7, base=2)

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
        wait_until(lambda: len(drafter.held[0].token_ids) == 6 + WINDOW)
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


class TestRunAhead:
    def test_ends_at_the_window_and_the_loop_sleeps(self, drafter: ScriptedDrafter, link: Link) -> None:
        drafter.let_all()
        link.open(7)
        assert link.reply() == proposal(7, base=2)
        wait_until(lambda: drafter.num_steps_asked == WINDOW)
        time.sleep(0.05)  # in which an awake loop would take thousands of turns
        assert drafter.num_steps_asked == WINDOW
        assert len(drafter.held[0].token_ids) == 2 + WINDOW
        link.advance(7, 2, 702, 703)
        assert link.reply() == proposal(7, base=4)
        wait_until(lambda: drafter.num_steps_asked == WINDOW + 2)
        time.sleep(0.05)
        assert drafter.num_steps_asked == WINDOW + 2

    def test_waits_for_proposals_that_are_owed(self, drafter: ScriptedDrafter, link: Link) -> None:
        link.open(1)
        for _ in range(K):
            assert drafter.step() == [1]
        assert link.reply() == proposal(1, base=2)
        assert drafter.next_step() == [1]  # running ahead, when another sequence comes
        link.open(2)
        drafter.let()
        for _ in range(K):
            assert drafter.step() == [2]
        assert link.reply() == proposal(2, base=2)
        assert drafter.step() == [1, 2]

    def test_a_sequence_whose_window_is_full_is_left_out(self, drafter: ScriptedDrafter, link: Link) -> None:
        link.open(1, window=K)
        for _ in range(K):
            drafter.step()
        assert link.reply() == proposal(1, base=2)
        link.open(2)
        for _ in range(K):
            drafter.step()
        assert link.reply() == proposal(2, base=2)
        assert drafter.step() == [2]

    def test_nothing_is_drafted_beyond_the_models_length(self, drafter: ScriptedDrafter, link: Link) -> None:
        drafter.max_model_len = 6
        drafter.let_all()
        link.open(7, length=4)
        assert link.reply() == proposal(7, base=4, count=2)
        link.advance(7, 4, 704)
        assert link.reply() == proposal(7, base=5, count=1)
        link.advance(7, 4, 704, 1, 2, 3)  # the target goes on alone
        assert link.reply() == SpeculateReply(proposals={7: Proposal(7, 8, [])})
        assert drafter.num_steps_asked == 2


class TestBranches:
    """One branch beside the main path."""

    @pytest.fixture
    def worker(self, drafter: ScriptedDrafter) -> Iterator[DraftWorker]:
        worker = DraftWorker(drafter, run_ahead_branches=1)
        worker.start()
        yield worker
        drafter.let_all()
        worker.stop()

    def hits(self, worker: DraftWorker) -> dict[tuple[str, str], float]:
        return {(r.name.rpartition("_")[2], r.labels["kind"]): r.value for r in worker.run_ahead.readings()}

    @pytest.mark.parametrize(
        ("news", "kind"),
        [([752], "rejected_at_0"), ([702, 753], "rejected_at_1"), ([702, 703, 704, 705], "all_accepted")],
    )
    def test_an_outcome_on_a_branch_is_answered_without_a_step(
        self, news: list[int], kind: str, drafter: ScriptedDrafter, worker: DraftWorker, link: Link
    ) -> None:
        link.open(7)
        for _ in range(3 * K):
            drafter.step()
        assert link.reply() == proposal(7, base=2)
        drafter.next_step()
        link.advance(7, 2, *news)
        drafter.let()
        assert link.reply() == proposal(7, base=2 + len(news))
        assert self.hits(worker) == {("hits", kind): 1}

    def test_another_outcome_is_a_miss(self, drafter: ScriptedDrafter, worker: DraftWorker, link: Link) -> None:
        link.open(7)
        drafter.let_all()
        assert link.reply() == proposal(7, base=2)
        link.advance(7, 2, 702, 1)
        assert link.reply() == proposal(7, base=4)
        link.advance(7, 4, 1)
        assert link.reply() == proposal(7, base=5)
        assert self.hits(worker) == {("misses", "rejected_at_1"): 1, ("misses", "rejected_at_0"): 1}

    def test_ends_when_every_branch_is_as_deep_as_a_proposal(self, drafter: ScriptedDrafter, link: Link) -> None:
        drafter.let_all()
        link.open(7)
        assert link.reply() == proposal(7, base=2)
        (sequence,) = drafter.held
        branches = [sequence.children(sequence.main_node(depth))[1] for depth in range(K + 1)]
        wait_until(lambda: not any(sequence.missing(1000, branch) for branch in branches))
        time.sleep(0.05)
        assert len(sequence.parents) == 2 * WINDOW + (K + 1) * 2 * K
        link.advance(7, 2, 702, 703, 704, 755)
        assert link.reply() == proposal(7, base=6)

    def test_a_sequence_without_a_window_has_none(
        self, drafter: ScriptedDrafter, worker: DraftWorker, link: Link
    ) -> None:
        drafter.let_all()
        link.open(7, window=K)
        assert link.reply() == proposal(7, base=2)
        link.advance(7, 2, 702)
        assert link.reply() == proposal(7, base=3)
        assert drafter.held[0].is_chain
        assert self.hits(worker) == {}

    def test_there_are_none_when_blocks_become_scarce(self, drafter: ScriptedDrafter, link: Link) -> None:
        drafter.num_used_blocks = 8
        drafter.let_all()
        link.open(7)
        assert link.reply() == proposal(7, base=2)
        wait_until(lambda: drafter.num_steps_asked == WINDOW)
        assert drafter.held[0].is_chain

    def test_a_tree_is_answered_from_a_branch_too(
        self, drafter: ScriptedDrafter, worker: DraftWorker, link: Link
    ) -> None:
        shape = (-1, 0, -1)
        worker.receive(link.number, SpeculateRequest(opens={7: replace(opening(7), shape=shape)}))
        drafter.let_all()
        assert link.reply() == SpeculateReply(proposals={7: Proposal(7, 2, [702, 703, 752], [-1, 0, -1])})
        wait_until(lambda: drafter.num_steps_asked >= 6)
        worker.receive(link.number, SpeculateRequest(advances={7: Advance(7, 2, [752], K, shape)}))
        assert link.reply() == SpeculateReply(proposals={7: Proposal(7, 3, [703, 704, 753], [-1, 0, -1])})


class TestSequencesThatAreNotHeld:
    def test_news_of_an_unknown_sequence_say_that_it_is_lost(self, link: Link) -> None:
        link.advance(7, 2, 702)
        assert link.reply() == SpeculateReply(lost={7})

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
        wait_until(lambda: drafter.wire_ids == {2})
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
        wait_until(lambda: worker.num_sequences == 2)
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
        wait_until(lambda: worker.num_sequences == 1)
        link.advance(7, 2, 702)
        assert link.reply() == proposal(7, base=3)

    def test_a_drafter_that_fails_ends_the_loop_and_says_why(
        self, drafter: ScriptedDrafter, worker: DraftWorker, link: Link
    ) -> None:
        drafter.failure = RuntimeError("out of luck")
        link.open(7)
        drafter.step()
        wait_until(lambda: worker.error is not None)
        assert worker.error is drafter.failure
