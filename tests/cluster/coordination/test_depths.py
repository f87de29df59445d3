"""Depths follow what was measured, and what is not tried any more is still looked at now and then."""

from __future__ import annotations

import pytest

from cluster.config import SpeculationConfig
from cluster.coordination.depths import DepthPlanner
from cluster.coordination.link import DraftLink
from cluster.coordination.sequence import ActiveLink, Round, SpeculativeSequence
from cluster.coordination.stats import CoordinatorStats
from cluster.speculation.costs import LinkCosts
from cluster.speculation.drafts import Drafts
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.speculation.tree import Shape
from cluster.wire.messages import Proposal

NUM_STEPS_TO_A_PLAN = 16  # at most, for a few sequences
ROWS = (1, 2, 4, 8, 16, 32)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """A planner, the sequences it plans for, and how long their steps take."""

    def __init__(self, num_sequences: int = 2, **config: object) -> None:
        self.clock = Clock()
        self.planner = DepthPlanner(SpeculationConfig.model_validate(config), 64, self.clock)
        self.costs = LinkCosts(64)
        self.costs.observe_reply(0.002, 0.0015, 0.0003, 1)
        self.sequences = [new_sequence() for _ in range(num_sequences)]
        for sequence in self.sequences:
            self.planner.join(sequence)

    def rows_cost(self, seconds_a_row: float, repeats: int = 60) -> None:
        for _ in range(repeats):
            for rows in ROWS:
                self.planner.step_seconds.observe(rows, 0.020 + seconds_a_row * rows)

    def accepts(self, num_accepted: int, rounds: int = 60) -> None:
        """Of four drafts a round."""
        for _ in range(rounds):
            self.observe([verified(sequence, 4, num_accepted) for sequence in self.sequences])

    def observe(self, rounds: list[Round]) -> None:
        self.planner.observe_rounds(rounds, self.clock.now, is_pure=True)

    def wanted(self, sequence: SpeculativeSequence) -> int:
        """How many draft tokens are asked for when it has committed."""
        if sequence.link is None:
            sequence.opened(ActiveLink(DraftLink("a", "fingerprint", lambda _: None), self.costs), 1)
        return self.planner.wanted(sequence, self.clock.now)[0]

    def shape(self, sequence: SpeculativeSequence) -> Shape | None:
        """Of the tree that is asked for."""
        self.wanted(sequence)
        return self.planner.wanted(sequence, self.clock.now)[1]

    def step(self, seconds: float = 0.02) -> None:
        self.clock.now += seconds
        if self.planner.begin_step(len(self.sequences)):
            self.planner.plan(self.sequences, None, len(self.sequences))

    def steps(self, number: int = NUM_STEPS_TO_A_PLAN) -> None:
        for _ in range(number):
            self.step()

    @property
    def depths(self) -> list[int]:
        return [sequence.depth for sequence in self.sequences]

    @property
    def shadows(self) -> list[SpeculativeSequence]:
        return [sequence for sequence in self.sequences if sequence.is_shadow]


def new_sequence(k: int | None = None) -> SpeculativeSequence:
    return SpeculativeSequence([1, 2, 3], 3, SamplingParams(), NoiseKey(1, 2), k)


def verified(sequence: SpeculativeSequence, num_drafts: int, num_accepted: int) -> Round:
    return Round(sequence, Drafts([7] * num_drafts), [7] * num_accepted + [8])


def proposes(sequence: SpeculativeSequence, base: int, *tokens: int) -> None:
    sequence.answered(Proposal(1, base, tokens), 0.0, CoordinatorStats())


@pytest.fixture
def off() -> Engine:
    """Speculation does not pay."""
    engine = Engine(num_sequences=4)
    engine.rows_cost(0.02)
    engine.accepts(0)
    engine.steps()
    assert engine.depths == [0] * 4
    return engine


def test_it_begins_with_the_configured_depth() -> None:
    engine = Engine(num_speculative_tokens=3)
    engine.step()
    assert engine.depths == [3, 3]


def test_a_request_has_what_it_asked_for() -> None:
    engine = Engine()
    engine.rows_cost(0.0)
    engine.sequences = [new_sequence(2), new_sequence()]
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
    newcomer = new_sequence()
    off.planner.join(newcomer)
    assert newcomer.depth == 0


def test_a_step_in_some_seconds_is_plain() -> None:
    engine = Engine()
    engine.rows_cost(0.0001)
    engine.accepts(4)
    engine.steps()
    plain = 0
    for _ in range(1000):  # 20 s
        engine.step()
        plain += engine.planner.verified_depth(engine.sequences[0]) == 0
    assert 3 <= plain <= 10


def test_fixed_depths_are_never_probed() -> None:
    engine = Engine(controller="fixed")
    for _ in range(1000):
        engine.step()
        assert engine.planner.verified_depth(engine.sequences[0]) == 4


def test_while_it_is_off_a_few_shadows_are_drafted_for(off: Engine) -> None:
    assert len(off.shadows) == 2
    for sequence in off.sequences:
        assert (off.wanted(sequence) > 0) == sequence.is_shadow


def test_a_shadow_is_drafted_for_seldom(off: Engine) -> None:
    (shadow, _) = off.shadows
    asked = 0
    for _ in range(1000):  # 20 s
        off.step()
        asked += off.wanted(shadow) > 0
    # A proposal of 3 tokens takes the draft 0.9 ms, and may be 1 % of its time.
    assert 120 <= asked <= 222


def test_a_shadow_that_would_be_confirmed_switches_it_on_again(off: Engine) -> None:
    off.rows_cost(0.0001, repeats=200)  # other sequences have gone
    off.steps()
    before = off.depths
    for _ in range(40):
        for shadow in off.shadows:
            base = len(shadow.token_ids)
            proposes(shadow, base, 7, 8, 9)
            for token in (7, 8, 9):
                shadow.token_ids.append(token)  # type: ignore[attr-defined]
                off.planner.shadows.judge_one(shadow)
            assert shadow.proposal is None
    off.steps()
    assert sum(off.depths) > sum(before)
    assert off.shadows == []


def test_a_shadow_is_judged_as_soon_as_a_token_differs(off: Engine) -> None:
    (shadow, _) = off.shadows
    proposes(shadow, 3, 7, 8, 9)
    shadow.token_ids.append(7)  # type: ignore[attr-defined]
    off.planner.shadows.judge_one(shadow)
    assert shadow.proposal is not None
    shadow.token_ids.append(1)  # type: ignore[attr-defined]
    off.planner.shadows.judge_one(shadow)
    assert shadow.proposal is None


def test_a_shadow_is_verified_now_and_then(off: Engine) -> None:
    """Else nobody would know any more what a row costs."""
    (shadow, _) = off.shadows
    off.clock.now += 10.0
    off.step()
    assert off.planner.verified_depth(shadow) > 0
    off.observe([verified(shadow, 3, 1)])
    off.step()
    assert off.planner.verified_depth(shadow) == 0


def test_a_closed_shadow_has_a_successor(off: Engine) -> None:
    (shadow, _) = off.shadows
    off.planner.leave(shadow)
    off.sequences.remove(shadow)
    off.steps()
    assert len(off.shadows) == 2
    assert shadow not in off.shadows


@pytest.mark.parametrize(("num_rows", "is_due"), [(4, False), (8, False), (2, False), (9, True), (1, True)])
def test_another_load_is_planned_for_at_once(num_rows: int, is_due: bool) -> None:
    engine = Engine(num_sequences=4)
    engine.rows_cost(0.001)
    engine.step()
    assert engine.planner.begin_step(num_rows) == is_due


class TestTrees:
    def poor_draft(self, **config: object) -> Engine:
        """Of every four roots the second is the target's choice as often as the first; rows cost nothing."""
        engine = Engine(num_sequences=1, tree_width=4, **config)
        engine.rows_cost(0.0)
        for round_number in range(200):
            chosen = [round_number % 5 // 2, 7]
            engine.observe([Round(engine.sequences[0], Drafts([0, 1, 2, 3], [-1] * 4), chosen)])
        engine.clock.now += 10.0
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
        engine, opened = self.poor_draft(), new_sequence()
        engine.planner.join(opened)
        assert engine.shape(opened) is not None

    def test_a_number_that_was_asked_for_is_kept(self) -> None:
        engine, asked = self.poor_draft(), new_sequence(k=5)
        engine.planner.join(asked)
        shape = engine.shape(asked)
        assert shape is not None
        assert len(shape) == 5

    def test_shadows_get_chains(self) -> None:
        engine = self.poor_draft()
        engine.planner.shadows.appoint(engine.sequences)
        assert engine.wanted(engine.sequences[0]) == 3
        assert engine.shape(engine.sequences[0]) is None
