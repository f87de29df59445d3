"""Tests of the draft worker's work while targets verify, with its real loop and thread and a scripted drafter.

They cover how far it runs ahead, in which order, and the branches that it keeps in addition to the main path.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from cluster.drafters.base import DraftSequence
from cluster.drafting.worker import DraftWorker
from cluster.speculation.drafts import Drafts, path_to
from cluster.wire.messages import Advance, Proposal, SpeculateReply, SpeculateRequest
from tests.waiting import wait_until

from .scripted import WAIT_S, WINDOW, K, Link, ScriptedDrafter, drafts, opening, proposal


class TestRunAhead:
    def test_ends_at_the_window_and_the_loop_sleeps(self, drafter: ScriptedDrafter, link: Link) -> None:
        drafter.let_all()
        link.open(7)
        assert link.reply() == proposal(7, base=2)
        wait_until(lambda: drafter.num_steps_asked == WINDOW, WAIT_S)
        time.sleep(0.05)  # in which an awake loop would take thousands of turns
        assert drafter.num_steps_asked == WINDOW
        assert len(drafter.held[0].token_ids) == 2 + WINDOW
        link.advance(7, 2, 702, 703)
        assert link.reply() == proposal(7, base=4)
        wait_until(lambda: drafter.num_steps_asked == WINDOW + 2, WAIT_S)
        time.sleep(0.05)
        assert drafter.num_steps_asked == WINDOW + 2

    def let_another_come(self, drafter: ScriptedDrafter, link: Link) -> None:
        """Sequence 2 comes while sequence 1, which has its proposal, runs ahead."""
        link.open(1)
        for _ in range(K):
            assert drafter.step() == [1]
        assert link.reply() == proposal(1, base=2)
        assert drafter.next_step() == [1]
        link.open(2)
        drafter.let()

    def test_goes_on_beside_proposals_that_are_owed(self, drafter: ScriptedDrafter) -> None:
        worker = DraftWorker(drafter, clock=lambda: 0.0)  # rows cost nothing
        worker.start()
        link = Link(worker)
        self.let_another_come(drafter, link)
        assert drafter.step() == [2]  # its prompt
        for _ in range(1, K):
            assert drafter.step() == [2, 1]
        assert link.reply() == proposal(2, base=2)
        drafter.let_all()
        worker.stop()

    def test_ends_where_there_are_too_many_sequences(
        self, drafter: ScriptedDrafter, link: Link, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("cluster.drafting.worker.MAX_SEQUENCES_AHEAD", 1)
        self.let_another_come(drafter, link)
        for _ in range(K):
            assert drafter.step() == [2]
        assert link.reply() == proposal(2, base=2)
        drafter.let_all()
        time.sleep(0.05)
        assert drafter.num_steps_asked == 0  # since then

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
    """Tests with one branch in addition to the main path."""

    @pytest.fixture
    def worker(self, drafter: ScriptedDrafter) -> Iterator[DraftWorker]:
        worker = DraftWorker(drafter, run_ahead_branches=1)
        worker.start()
        yield worker
        drafter.let_all()
        worker.stop()

    def is_prepared(self, sequence: DraftSequence) -> bool:
        """Returns whether the next proposal is ready for every outcome on the main path or on a branch."""
        if sequence.num_drafted <= K + 1:
            return False
        main = [-1, *path_to(sequence.tip, sequence.parents)]
        branches = [sequence.children(node)[1] for node in main[: K + 1]]
        return not any(sequence.missing(1000, node) for node in [*branches, main[K + 1]])

    def hits(self, worker: DraftWorker) -> dict[tuple[str, str], float]:
        return {(r.name.rpartition("_")[2], r.labels["kind"]): r.value for r in worker.run_ahead.readings()}

    @pytest.mark.parametrize(
        ("news", "kind"),
        [([752], "rejected_at_0"), ([702, 753], "rejected_at_1"), ([702, 703, 704, 705], "all_accepted")],
    )
    def test_an_outcome_on_a_branch_is_answered_without_a_step(
        self, news: list[int], kind: str, drafter: ScriptedDrafter, worker: DraftWorker, link: Link
    ) -> None:
        drafter.let_all()
        link.open(7)
        assert link.reply() == proposal(7, base=2)
        (sequence,) = drafter.held
        wait_until(lambda: self.is_prepared(sequence), WAIT_S)
        link.advance(7, 2, *news)
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
        wait_until(lambda: self.is_prepared(sequence), WAIT_S)
        wait_until(lambda: sequence.num_drafted == WINDOW, WAIT_S)
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
        wait_until(lambda: drafter.num_steps_asked == WINDOW, WAIT_S)
        assert drafter.held[0].is_chain

    def test_a_tree_is_answered_from_a_branch_too(
        self, drafter: ScriptedDrafter, worker: DraftWorker, link: Link
    ) -> None:
        shape = (-1, 0, -1)
        worker.receive(link.number, SpeculateRequest(opens={7: replace(opening(7), shape=shape)}))
        drafter.let_all()
        assert link.reply() == SpeculateReply(proposals={7: Proposal(7, 2, [702, 703, 752], [-1, 0, -1])})
        (sequence,) = drafter.held
        wait_until(lambda: len(sequence.parents) > 4 and not sequence.missing(1000, sequence.children(-1)[1]), WAIT_S)
        worker.receive(link.number, SpeculateRequest(advances={7: Advance(7, 2, [752], K, shape)}))
        assert link.reply() == SpeculateReply(proposals={7: Proposal(7, 3, [703, 704, 753], [-1, 0, -1])})


class TestParts:
    """A coordinator that takes proposals in parts is told what was drafted ahead."""

    @pytest.fixture
    def worker(self, drafter: ScriptedDrafter) -> Iterator[DraftWorker]:
        # A second passes at each look: parts are sent as they come, and between them that there is nothing to tell.
        worker = DraftWorker(drafter, run_ahead_branches=1, clock=itertools.count().__next__)
        worker.start()
        yield worker
        drafter.let_all()
        worker.stop()

    def reply(self, link: Link) -> Proposal:
        while not (proposals := link.reply().proposals):
            pass
        return proposals[7]

    def test_grow_to_the_tree_that_was_drafted(self, drafter: ScriptedDrafter, worker: DraftWorker, link: Link) -> None:
        worker.receive(link.number, SpeculateRequest(opens={7: replace(opening(7), takes_parts=True)}))
        drafter.let_all()
        tree = self.reply(link)
        assert (tree.start, tree.is_whole) == (0, False)
        wait_until(lambda: drafter.held[0].num_drafted == WINDOW, WAIT_S)
        while len(tree.drafts.main_path(WINDOW) or ()) < WINDOW or len(tree.token_ids) < WINDOW + (K + 1) * (K + 1):
            grown = tree.grown(self.reply(link))
            assert grown is not None
            tree = grown
        assert tree.is_whole
        assert tree.drafts.main_path(WINDOW) == Drafts(drafts(7, 2, WINDOW))
        for news in ([752], [702, 753], [702, 703, 754], [702, 703, 704, 755]):  # each next best, in turn
            left = tree.drafts.after(news)
            assert left is not None
            assert left == Drafts(drafts(7, 2 + len(news), K))

    def test_are_not_sent_to_who_does_not_take_them(
        self, drafter: ScriptedDrafter, worker: DraftWorker, link: Link
    ) -> None:
        drafter.let_all()
        link.open(7)
        assert self.reply(link) == Proposal(7, 2, drafts(7, 2, K))
        wait_until(lambda: drafter.held[0].num_drafted == WINDOW, WAIT_S)
        link.advance(7, 2, 702)
        assert self.reply(link) == Proposal(7, 3, drafts(7, 3, K))


class TestRests:
    """Steps take 10 ms of a clock that the test moves, and the target commits a token every 65 ms."""

    ROUND, STEP = 0.065, 0.01

    @pytest.fixture
    def begun_at(self, drafter: ScriptedDrafter, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        """When each step began."""
        draft, begun = drafter.draft, list[float]()

        def draft_in_time(sequences: Sequence[DraftSequence]) -> list[DraftSequence]:
            begun.append(self.now)
            self.now += self.STEP
            return draft(sequences)

        monkeypatch.setattr(drafter, "draft", draft_in_time)
        drafter.let_all()
        return begun

    def go_on(self, worker: DraftWorker, until: float) -> None:
        while True:
            idle = worker.idle_seconds
            if idle is None or self.now + idle >= until:
                self.now = max(self.now, until)
                return
            self.now += idle
            worker.step()

    def test_no_step_is_under_way_when_tokens_are_expected(
        self, drafter: ScriptedDrafter, begun_at: list[float]
    ) -> None:
        self.now = 0.0
        worker = DraftWorker(drafter, clock=lambda: self.now)
        link = Link(worker)
        link.open(7, window=40)
        worker.step()
        for round_number in range(8):
            self.go_on(worker, self.ROUND * (round_number + 1))
            link.advance(7, 2 + round_number, 1000 + round_number)  # none of the drafts
            worker.step()
        advanced_at = self.now - self.STEP
        begun_at.clear()
        self.go_on(worker, advanced_at + self.ROUND)
        assert begun_at
        assert all(began + self.STEP <= advanced_at + self.ROUND + 1e-9 for began in begun_at)
        num_steps = len(begun_at)
        self.go_on(worker, advanced_at + 1.9 * self.ROUND)
        assert len(begun_at) == num_steps  # they may come any time
        self.go_on(worker, advanced_at + 3 * self.ROUND)
        assert len(begun_at) > num_steps
