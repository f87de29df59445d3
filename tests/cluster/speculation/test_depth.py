"""Controllers choose the depth that pays."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from cluster.speculation.acceptance_model import PositionRates, SequenceAcceptance
from cluster.speculation.costs import DraftStep, LinkCosts
from cluster.speculation.depth import (
    Candidate,
    DepthController,
    FixedController,
    GoodputController,
    NextStep,
)
from cluster.speculation.drafts import depths_of as levels_of
from cluster.speculation.learned_curve import LearnedCurve
from cluster.speculation.step_times import StepTimes
from cluster.speculation.tree import AcceptanceTable, RoundTime, Shape, best_shape, token_rate
from cluster.speculation.tree_policy import Template

MAX_DEPTH = 8
MAX_ROWS = 512
TIMEOUT_S = 0.050
MEMORY_BOUND = {1: 0.024, 4: 0.026, 8: 0.038, 16: 0.056, 64: 0.180}


def curve(points: dict[int, float]) -> LearnedCurve:
    learned = LearnedCurve(512)
    for _ in range(30):
        for rows, seconds in points.items():
            learned.observe(rows, seconds)
    return learned


def link(round_trip: float = 0.0005, step: float = 0.0008) -> LinkCosts:
    costs = LinkCosts(64, MAX_DEPTH)
    costs.observe_reply(round_trip, DraftStep(step, 1, 1))
    costs.observe_reply(round_trip, DraftStep(2 * step, 16, 16))
    return costs


def acceptance(rate: float) -> SequenceAcceptance:
    shared = PositionRates(MAX_DEPTH)
    rng = np.random.default_rng(0)
    for _ in range(500):
        shared.observe(MAX_DEPTH, min(MAX_DEPTH, int(rng.geometric(1 - rate)) - 1))
    return SequenceAcceptance(shared)


def candidates(rate: float, count: int, costs: LinkCosts | None = None) -> list[Candidate]:
    costs = costs or link()
    own = acceptance(rate)
    return [Candidate(own, MAX_DEPTH, costs) for _ in range(count)]


def steps_of(learned: LearnedCurve) -> StepTimes:
    steps = StepTimes(MAX_ROWS)
    steps.curve = learned
    return steps


def goodput(points: dict[int, float]) -> GoodputController:
    return GoodputController(steps_of(curve(points)), TIMEOUT_S)


def depths_of(controller: DepthController, own: Sequence[Candidate], num_rows: int) -> list[int]:
    return controller.choose(NextStep(own, num_rows)).num_drafts


class TestGoodput:
    def test_one_stream_speculates(self) -> None:
        assert depths_of(goodput(MEMORY_BOUND), candidates(0.7, 1), 1)[0] >= 2

    def test_better_drafts_go_deeper(self) -> None:
        controller = goodput(MEMORY_BOUND)
        depths = [depths_of(controller, candidates(rate, 1), 1)[0] for rate in (0.3, 0.6, 0.9)]
        assert depths == sorted(depths)
        assert depths[0] < depths[-1]

    def test_rows_that_cost_switch_it_off(self) -> None:
        per_row = {rows: 0.010 * rows for rows in (1, 2, 4, 8, 16, 64, 256)}
        assert depths_of(goodput(per_row), candidates(0.6, 16), 16) == [0] * 16

    def test_a_slow_link_means_less_and_then_nothing(self) -> None:
        controller = goodput(MEMORY_BOUND)
        depths = [
            depths_of(controller, candidates(0.6, 1, link(round_trip=seconds)), 1)[0] for seconds in (0.0, 0.03, 0.045)
        ]
        assert depths[0] > 0
        assert depths[-1] == 0

    def test_a_proposal_that_would_come_too_late_is_not_asked_for(self) -> None:
        slow = candidates(0.9, 1, link(round_trip=2 * TIMEOUT_S))
        assert depths_of(goodput({1: 1.0, 16: 1.0}), slow, 1) == [0]

    def test_good_sequences_get_the_rows(self) -> None:
        costs = link()
        both = [Candidate(acceptance(0.9), MAX_DEPTH, costs), Candidate(acceptance(0.2), MAX_DEPTH, costs)]
        good, bad = depths_of(goodput(MEMORY_BOUND), both, 2)
        assert good > bad

    @pytest.mark.parametrize("has_prompts", [False, True])
    def test_a_step_holds_the_rows_that_are_chosen(self, has_prompts: bool) -> None:
        """Or sequences that come first would get them all."""
        steps = steps_of(curve({1: 0.02, 4096: 0.0201}))
        if has_prompts:
            for _ in range(8):
                steps.joined()
                steps.ended()
            steps.observe_prompts(512, 64)  # nearly every step has some
        free = GoodputController(steps, TIMEOUT_S)
        depths = depths_of(free, candidates(0.9, 64), 64)
        # Three more of each, or seven; where prompts are about, a row more may not pay, but no more than these fit.
        room = (MAX_ROWS - 64) * (0.51 if has_prompts else 1)
        assert room - 64 < sum(depths) <= room
        assert max(depths) - min(depths) <= 1
        assert depths_of(free, candidates(0.9, 1), MAX_ROWS) == [0]

    def test_what_a_request_asked_for_is_kept(self) -> None:
        asked = Candidate(acceptance(0.1), MAX_DEPTH, link(), fixed_depth=5)
        free = Candidate(acceptance(0.9), MAX_DEPTH, link())
        assert depths_of(goodput(MEMORY_BOUND), [asked, free], 2)[0] == 5

    def test_a_request_with_a_depth_of_its_own_changes_little_for_others(self) -> None:
        """Its drafts are rows of the step, and not tokens that are committed for certain."""
        asked = Candidate(acceptance(0.3), MAX_DEPTH, link(), fixed_depth=8)
        alone = depths_of(goodput(MEMORY_BOUND), candidates(0.8, 3), 4)
        others = depths_of(goodput(MEMORY_BOUND), [asked, *candidates(0.8, 3)], 4)[1:]
        assert min(others) > 0
        assert abs(sum(others) - sum(alone)) <= 4

    def test_expected_tokens_are_the_bonus_token_and_each_draft_by_its_survival(self) -> None:
        own = [*candidates(0.8, 2), Candidate(acceptance(0.5), MAX_DEPTH, link(), fixed_depth=3)]
        choice = goodput(MEMORY_BOUND).choose(NextStep(own, 3))
        assert max(choice.num_drafts[:2]) > 0
        for candidate, depth, tokens in zip(own, choice.num_drafts, choice.expected_tokens, strict=True):
            assert tokens == pytest.approx(1.0 + sum(candidate.acceptance.survival()[:depth]))

    def test_limits_are_kept(self) -> None:
        own = [Candidate(acceptance(0.95), limit, link()) for limit in (0, 1, 2)]
        depths = depths_of(goodput({1: 0.02, 512: 0.02}), own, 3)
        assert all(depth <= limit for depth, limit in zip(depths, (0, 1, 2), strict=True))

    @pytest.mark.parametrize("seed", range(20))
    def test_no_choice_is_much_better(self, seed: int) -> None:
        """Against all choices of depths 0 to 4 for three sequences, by the same estimates."""
        rng = np.random.default_rng(seed)
        costs = link(rng.uniform(0, 0.01), rng.uniform(0.0002, 0.004))
        times = np.cumsum(rng.uniform(0.001, 0.02, size=6))
        verify = curve(dict(zip((1, 2, 4, 8, 16, 32), times, strict=True)))
        own = [Candidate(acceptance(rate), 4, costs) for rate in rng.uniform(0.2, 0.95, size=3)]
        worth = [[0.0, *np.cumsum(c.acceptance.survival())] for c in own]

        def rate(depths: tuple[int, ...]) -> float:
            wait = costs.wait_seconds(np.array([max(depths)]), np.array([sum(d > 0 for d in depths)]))[0]
            seconds = float(verify.at(3 + sum(depths))) + wait
            return (3 + sum(worth[i][d] for i, d in enumerate(depths))) / seconds

        chosen = rate(tuple(depths_of(GoodputController(steps_of(verify), 1.0), own, 3)))
        best = max(rate(depths) for depths in itertools.product(range(5), repeat=3))
        assert chosen >= 0.98 * best


def templates(rates: AcceptanceTable) -> list[Template]:
    return [Template.of(rates, MAX_DEPTH, level) for level in range(1, 1 + MAX_DEPTH)]


class TestTrees:
    """Tests with one sequence. The target chooses its children of rank 0, 1, ... with probability `RATES`."""

    RATES = (0.45, 0.25, 0.12)

    def choice(self, points: dict[int, float], costs: LinkCosts, rates: Sequence[float] = RATES) -> tuple[Shape, float]:
        """The shape of the tree, empty where it is a chain, and the tokens a second that are promised."""
        candidate = Candidate(acceptance(rates[0]), MAX_DEPTH, costs)
        choice = goodput(points).choose(NextStep([candidate], 1, templates=templates(np.array([rates]))))
        return choice.template.parents[: choice.num_drafts[0]] if choice.template else (), choice.tokens_per_second

    def test_a_poor_draft_gets_a_tree(self) -> None:
        shape, rate = self.choice({1: 0.02, 64: 0.021}, link())
        chain_rate = goodput({1: 0.02, 64: 0.021}).choose(NextStep(candidates(self.RATES[0], 1), 1)).tokens_per_second
        assert shape.count(-1) > 1
        assert rate > chain_rate

    def test_a_good_draft_gets_a_chain(self) -> None:
        assert self.choice(MEMORY_BOUND, link(), (0.95, 0.02, 0.01))[0] == ()

    def test_rows_that_cost_mean_no_tree(self) -> None:
        assert self.choice({rows: 0.01 * rows for rows in (1, 2, 4, 8, 16, 64)}, link())[0] == ()

    def test_a_slow_draft_gets_a_flatter_tree(self) -> None:
        fast, _ = self.choice({1: 0.02, 64: 0.02}, link(step=0.0001))
        slow, _ = self.choice({1: 0.02, 64: 0.02}, link(step=0.004))
        assert 0 < max(levels_of(slow)) < max(levels_of(fast))

    @pytest.mark.parametrize("seed", range(10))
    def test_no_tree_is_much_better(self, seed: int) -> None:
        """Against the best of every size and depth, by the same estimates."""
        rng = np.random.default_rng(seed)
        first = rng.uniform(0.3, 0.7)
        second = rng.uniform(0.2, 0.8) * (1 - first)
        third = rng.uniform(0.2, 0.8) * min(second, 1 - first - second)
        round_trip, step = rng.uniform(0, 0.005), rng.uniform(0.0002, 0.002)
        costs = link(round_trip, step)
        times = np.cumsum(rng.uniform(0.001, 0.01, size=5)) + 0.01
        points = dict(zip((1, 2, 4, 8, 16), times, strict=True))
        verify = curve(points)
        candidate = Candidate(acceptance(first), MAX_DEPTH, costs)
        own = [*candidate.acceptance.survival(), 0.0]
        rates = np.array([[own[0], min(second, own[0]), min(third, own[0])]])
        wait = costs.wait_seconds(np.array([1, 2]), np.array([1, 1]))
        level = float(wait[1] - wait[0])
        time = RoundTime(lambda _: level, lambda rows: float(verify.at(rows)), float(wait[0]) - level)
        best = token_rate(best_shape(rates, range(1 + MAX_DEPTH), time), rates, time)
        choice = goodput(points).choose(NextStep([candidate], 1, templates=templates(rates)))
        assert choice.tokens_per_second >= 0.93 * best  # a tree must be 2 % better than a chain


def test_fixed_is_fixed() -> None:
    controller = FixedController(4)
    own = [Candidate(acceptance(0.5), MAX_DEPTH, None), Candidate(acceptance(0.5), MAX_DEPTH, None, fixed_depth=2)]
    choice = controller.choose(NextStep(own, 2))
    assert choice.num_drafts == [4, 2]
    assert choice.expected_tokens == pytest.approx([1.94, 1.75], abs=0.2)  # 1 + 0.5 + 0.25 + ..., about


def test_a_link_that_came_up_gets_drafts_although_steps_only_use_those_that_are_ready() -> None:
    old, new = link(step=0.020), link(step=0.020)
    for _ in range(100):
        old.observe_ready([MAX_DEPTH] * 3, [MAX_DEPTH] * 3)
    step = NextStep([*candidates(0.8, 3, old), *candidates(0.8, 1, new)], 4)
    controller = GoodputController(steps_of(curve(MEMORY_BOUND)), TIMEOUT_S)
    assert controller.choose(step).num_drafts[3] > 0
    for _ in range(20):
        new.observe_ready([0], [MAX_DEPTH])
    assert controller.choose(step).num_drafts[3] == 0
