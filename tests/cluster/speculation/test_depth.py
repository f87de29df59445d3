"""Controllers choose the depth that pays."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cluster.speculation.acceptance_model import PositionRates, SequenceAcceptance
from cluster.speculation.costs import LearnedCurve, LinkCosts
from cluster.speculation.depth import (
    Candidate,
    DepthController,
    FixedController,
    GoodputController,
    ThresholdController,
)

MAX_DEPTH = 8
TIMEOUT_S = 0.050
MEMORY_BOUND = {1: 0.024, 4: 0.026, 8: 0.038, 16: 0.056, 64: 0.180}


def curve(points: dict[int, float]) -> LearnedCurve:
    learned = LearnedCurve(512)
    for _ in range(30):
        for rows, seconds in points.items():
            learned.observe(rows, seconds)
    return learned


def link(round_trip: float = 0.0005, step: float = 0.0008) -> LinkCosts:
    costs = LinkCosts(64)
    costs.observe_reply(round_trip + 4 * step, 4 * step, step, 1)
    costs.observe_reply(round_trip + 4 * step, 4 * step, 2 * step, 16)
    return costs


def acceptance(rate: float) -> SequenceAcceptance:
    shared = PositionRates(MAX_DEPTH)
    rng = np.random.default_rng(0)
    for _ in range(500):
        shared.observe(MAX_DEPTH, int(rng.geometric(1 - rate)) - 1)
    return SequenceAcceptance(shared)


def candidates(rate: float, count: int, costs: LinkCosts | None = None) -> list[Candidate]:
    costs = costs or link()
    own = acceptance(rate)
    return [Candidate(own, MAX_DEPTH, costs) for _ in range(count)]


def goodput(points: dict[int, float]) -> GoodputController:
    return GoodputController(curve(points), TIMEOUT_S)


class TestGoodput:
    def test_one_stream_speculates(self) -> None:
        assert goodput(MEMORY_BOUND).choose(candidates(0.7, 1), 1)[0] >= 2

    def test_better_drafts_go_deeper(self) -> None:
        controller = goodput(MEMORY_BOUND)
        depths = [controller.choose(candidates(rate, 1), 1)[0] for rate in (0.3, 0.6, 0.9)]
        assert depths == sorted(depths)
        assert depths[0] < depths[-1]

    def test_rows_that_cost_switch_it_off(self) -> None:
        per_row = {rows: 0.010 * rows for rows in (1, 2, 4, 8, 16, 64, 256)}
        assert goodput(per_row).choose(candidates(0.6, 16), 16) == [0] * 16

    def test_a_slow_link_means_less_and_then_nothing(self) -> None:
        controller = goodput(MEMORY_BOUND)
        depths = [
            controller.choose(candidates(0.6, 1, link(round_trip=seconds)), 1)[0] for seconds in (0.0, 0.03, 0.045)
        ]
        assert depths[0] > 0
        assert depths[-1] == 0

    def test_a_proposal_that_would_come_too_late_is_not_asked_for(self) -> None:
        assert goodput({1: 1.0, 16: 1.0}).choose(candidates(0.9, 1, link(round_trip=2 * TIMEOUT_S)), 1) == [0]

    def test_good_sequences_get_the_rows(self) -> None:
        costs = link()
        both = [Candidate(acceptance(0.9), MAX_DEPTH, costs), Candidate(acceptance(0.2), MAX_DEPTH, costs)]
        good, bad = goodput(MEMORY_BOUND).choose(both, 2)
        assert good > bad

    def test_what_a_request_asked_for_is_kept(self) -> None:
        asked = Candidate(acceptance(0.1), MAX_DEPTH, link(), fixed_depth=5)
        free = Candidate(acceptance(0.9), MAX_DEPTH, link())
        assert goodput(MEMORY_BOUND).choose([asked, free], 2)[0] == 5

    def test_limits_are_kept(self) -> None:
        own = [Candidate(acceptance(0.95), limit, link()) for limit in (0, 1, 2)]
        depths = goodput({1: 0.02, 512: 0.02}).choose(own, 3)
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

        chosen = rate(tuple(GoodputController(verify, 1.0).choose(own, 3)))
        best = max(rate(depths) for depths in itertools.product(range(5), repeat=3))
        assert chosen >= 0.98 * best


class TestThreshold:
    def depth_after(self, acceptances: list[float], start: int = 5) -> int:
        controller = ThresholdController(start, 10)
        for rate in acceptances:
            controller.observe(100, round(100 * rate))
        return self.depth(controller)

    def depth(self, controller: DepthController) -> int:
        return controller.choose([Candidate(acceptance(0.5), 16, None)], 1)[0]

    @pytest.mark.parametrize(("rate", "depth"), [(0.95, 6), (0.85, 5), (0.7, 4), (0.5, 3)])
    def test_it_moves_by_its_thresholds(self, rate: float, depth: int) -> None:
        assert self.depth_after([rate] * 10) == depth

    def test_it_waits_for_ten_rounds(self) -> None:
        assert self.depth_after([0.1] * 9) == 5

    def test_it_stays_at_three_over_0_6(self) -> None:
        assert self.depth_after([0.7] * 200) == 3

    def test_it_stays_in_its_range(self) -> None:
        assert self.depth_after([0.1] * 200) == 1
        assert self.depth_after([0.99] * 200) == 10


def test_fixed_is_fixed() -> None:
    controller = FixedController(4)
    own = [Candidate(acceptance(0.5), MAX_DEPTH, None), Candidate(acceptance(0.5), MAX_DEPTH, None, fixed_depth=2)]
    assert controller.choose(own, 2) == [4, 2]
