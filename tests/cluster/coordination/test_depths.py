"""Depths follow what was measured."""

from __future__ import annotations

import pytest

from cluster.coordination.sequence import Round
from cluster.speculation.costs import DraftStep
from cluster.speculation.drafts import Drafts

from .planning import Engine, verified
from .scripted import new_sequence


def test_it_begins_with_the_configured_depth() -> None:
    engine = Engine(num_speculative_tokens=3)
    engine.step()
    assert engine.depths == [3, 3]


def test_a_request_has_what_it_asked_for() -> None:
    engine = Engine()
    engine.rows_cost(0.0)
    engine.sequences = [new_sequence(2), new_sequence(None)]
    for sequence in engine.sequences:
        engine.planner.join(sequence)
    engine.steps()
    assert engine.depths[0] == 2


def test_cheap_rows_and_good_drafts_go_deep() -> None:
    engine = Engine()
    engine.rows_cost(0.0001)
    engine.accepts(4)
    engine.steps()
    assert min(engine.depths) > 4


def test_new_sequences_begin_where_the_others_are(off: Engine) -> None:
    newcomer = new_sequence(None)
    off.planner.join(newcomer)
    assert newcomer.depth == 0


def test_new_sequences_begin_where_the_others_with_their_limit_are() -> None:
    """Otherwise chats next to many batch jobs would begin without drafts, and their limit would be missed."""
    engine = Engine(num_sequences=30, output_token_ms=None)
    chats = [new_sequence(None, output_limit=0.018) for _ in range(2)]
    for chat in chats:
        engine.planner.join(chat)
    engine.rows_cost(0.0008)
    engine.sequences = [*chats, *engine.sequences]
    engine.accepts(3)
    engine.planner.plan(engine.sequences, None, 32)
    assert engine.depths[0] > 0 == engine.depths[-1]
    for limit, depth in ((0.018, engine.depths[0]), (0.5, engine.depths[0]), (0.001, engine.depths[0]), (None, 0)):
        newcomer = new_sequence(None, output_limit=limit)
        engine.planner.join(newcomer)
        assert newcomer.depth == depth


@pytest.mark.parametrize(("num_rows", "is_due"), [(4, False), (8, False), (2, False), (9, True), (1, True)])
def test_another_load_is_planned_for_at_once(num_rows: int, is_due: bool) -> None:
    engine = Engine(num_sequences=4)
    engine.rows_cost(0.001)
    engine.steps(400)
    while not engine.planner.begin_step(4):
        pass
    engine.planner.plan(engine.sequences, None, 4)
    assert engine.planner.begin_step(num_rows) == is_due


def test_of_what_is_new_every_round_counts_at_once() -> None:
    """A dear draft whose drafts are never accepted has few rounds, not those of sixteen steps."""
    engine = Engine(num_sequences=1)
    engine.rows_cost(0.0)
    engine.wanted(engine.sequences[0])
    for _ in range(40):
        engine.costs.observe_reply(0.0005, DraftStep(0.010, 1, 1))  # half of a step of the target for each token
    num_rounds = 0
    while engine.planner.has_drafts:
        engine.observe([verified(engine.sequences[0], engine.depths[0], 0)])
        engine.step()
        num_rounds += 1
    assert num_rounds <= 5


def test_the_first_draft_of_a_worker_is_one_token() -> None:
    """It says what drafts take: with a dear draft many of them would be what the first tokens wait for."""
    engine = Engine(num_speculative_tokens=4)
    assert [engine.wanted(sequence, has_proposed=False) for sequence in engine.sequences] == [1, 1]


def test_what_was_asked_for_is_drafted_from_the_first() -> None:
    engine = Engine()
    sequence = new_sequence(3)
    engine.planner.join(sequence)
    assert engine.wanted(sequence, has_proposed=False) == 3


def test_those_that_join_are_planned_for_with_the_others() -> None:
    engine = Engine(num_sequences=4)
    engine.rows_cost(0.0001)
    engine.accepts(4)
    newcomer = new_sequence(None)
    engine.planner.join(newcomer)
    engine.planner.plan([*engine.sequences, newcomer], None, 5)
    assert newcomer.depth == engine.depths[0] > 4


def test_a_sequence_that_ends_before_the_next_plan_is_learned_from_while_little_is_known() -> None:
    engine = Engine(num_sequences=2)
    first, second = engine.sequences
    temperature = first.params.temperature
    assumed = engine.planner.survival("", temperature)[0]
    engine.planner.leave(first)
    engine.observe([verified(first, 4, 0)] * 40)
    known = engine.planner.survival("", temperature)[0]
    assert known < 0.2 < assumed
    engine.planner.leave(second)
    engine.observe([verified(second, 4, 4)] * 40)
    assert engine.planner.survival("", temperature)[0] == known


def test_without_draft_workers_nothing_is_compared_with_the_prediction() -> None:
    engine = Engine(num_sequences=2)
    engine.rows_cost(0.0001)
    engine.accepts(4)
    engine.steps()  # no link is up
    for _ in range(100):
        engine.planner.observe_speed([verified(sequence, 0, 0) for sequence in engine.sequences], 0.02)
    assert engine.planner.realised.share == 1.0


class TestTrees:
    def poor_draft(self, **config: object) -> Engine:
        """Returns an engine whose target chooses the first and the second of four roots equally often.

        Its rows cost nothing.
        """
        engine = Engine(num_sequences=1, tree_width=4, **config)
        engine.rows_cost(0.0)
        for round_number in range(200):
            chosen = [round_number % 5 // 2, 7]
            engine.observe([Round(engine.sequences[0], Drafts([0, 1, 2, 3], [-1] * 4), chosen)])
        engine.steps()
        return engine

    def test_a_tree_is_asked_for_where_it_promises_more(self) -> None:
        engine = self.poor_draft()
        (sequence,) = engine.sequences
        shape = engine.shape(sequence)
        assert shape is not None
        assert len(shape) == sequence.depth
        assert shape.count(-1) > 1
        assert sequence.expected_tokens > 1.0

    def test_a_new_sequence_gets_one_too(self) -> None:
        engine, opened = self.poor_draft(), new_sequence(None)
        engine.planner.join(opened)
        assert engine.shape(opened) is not None

    def test_a_number_that_was_asked_for_is_kept(self) -> None:
        engine, asked = self.poor_draft(), new_sequence(k=5)
        engine.planner.join(asked)
        shape = engine.shape(asked)
        assert shape is not None
        assert len(shape) == 5
