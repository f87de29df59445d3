"""Constants that decide a depth are few, and each has a visible effect."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import pytest

from cluster.speculation.acceptance_model import PositionRates, kind_of
from cluster.speculation.costs import DraftStep, LinkCosts
from cluster.speculation.device_depths import DeviceDepths
from cluster.speculation.tuning import TRIAL_DEPTHS
from cluster.targets.profile import profile_steps
from tests.cluster.coordination.planning import Engine

CLUSTER = Path(__file__).parents[3] / "cluster"
DECIDING = (  # files that choose depths, or predict what the choice depends on
    "coordination/depths.py",
    "coordination/row_reservations.py",
    "speculation/acceptance_model.py",
    "speculation/costs.py",
    "speculation/depth.py",
    "speculation/device_depths.py",
    "speculation/learned_curve.py",
    "speculation/realised_gain.py",
    "speculation/step_times.py",
    "speculation/tree_policy.py",
    "targets/device_speculator.py",
    "targets/profile.py",
    "vllm/core/device_rounds.py",
    "vllm/core/profiling.py",
)


def parsed(file: str) -> ast.Module:
    return ast.parse((CLUSTER / file).read_text(encoding="utf-8"))


def constants(file: str) -> list[str]:
    """Returns the module-level assignments of numbers and of tuples."""
    statements = (node for node in parsed(file).body if isinstance(node, ast.Assign))
    return [ast.unparse(node) for node in statements if isinstance(node.value, ast.Constant | ast.Tuple)]


def test_at_most_20_constants_decide_a_depth() -> None:
    assignments = [node for node in parsed("speculation/tuning.py").body if isinstance(node, ast.Assign)]
    assert len(assignments) <= 20


@pytest.mark.parametrize("file", DECIDING)
def test_no_other_file_has_one(file: str) -> None:
    assert constants(file) == []
    nodes = (node.value for node in ast.walk(parsed(file)) if isinstance(node, ast.Constant))
    numbers = {value for value in nodes if type(value) in (int, float)}
    assert numbers <= {0, 1, 2, 3, 4, 1e-9}  # grids begin with 1, 2, 3, 4; 1e-9 keeps a quotient finite


def rates_after(num_accepted: int, num_rejected: int) -> float:
    """Returns the rate of the first draft after rounds in which it was accepted, then rejected."""
    shared = PositionRates(1)
    for number in range(num_accepted + num_rejected):
        shared.observe(1, int(number < num_accepted))
        _ = shared.rates
    return shared.rates[0]


def test_a_window_of_tests_replaces_all_but_a_third_of_the_earlier_ones() -> None:
    assert rates_after(1000, 128) == pytest.approx(0.37, abs=0.1)


def test_before_any_test_a_draft_is_as_good_as_the_bundled_one() -> None:
    assert rates_after(0, 0) == pytest.approx(0.7, abs=0.1)


def test_eight_rejections_halve_what_was_assumed() -> None:
    assert rates_after(0, 8) == pytest.approx(0.35, abs=0.05)


@pytest.mark.parametrize(("one", "other", "are_alike"), [(0.65, 0.85, True), (0.0, 0.2, False), (0.8, 1.0, False)])
def test_similar_temperatures_share_their_acceptance(one: float, other: float, are_alike: bool) -> None:
    assert (kind_of(one) == kind_of(other)) is are_alike


def link(seconds: float) -> LinkCosts:
    costs = LinkCosts(64)
    for _ in range(100):
        costs.observe_reply(seconds, DraftStep(0.002, 1, 1))
    return costs


def test_eight_replies_of_a_slower_link_are_two_thirds_of_the_estimate() -> None:
    costs = link(0.010)
    for _ in range(8):
        costs.observe_reply(0.020, DraftStep(0.002, 1, 1))
    assert costs.round_trip_seconds == pytest.approx(0.010 + 0.010 * 2 / 3, abs=0.0015)


def test_a_reply_that_was_held_up_counts_as_three_times_what_was_expected() -> None:
    costs = link(0.010)
    costs.observe_reply(10.0, DraftStep(0.002, 1, 1))
    assert costs.round_trip_seconds == pytest.approx(0.0133, abs=0.001)


def test_a_plan_holds_for_sixteen_steps() -> None:
    engine, num_plans = Engine(num_sequences=1), 0
    engine.rows_cost(0.0001)
    engine.steps(1000)
    for _ in range(1600):
        if engine.planner.begin_step(1):
            engine.planner.plan(engine.sequences, None, 1)
            num_plans += 1
    assert num_plans == pytest.approx(100, abs=2)


@pytest.mark.parametrize(("gain", "best"), [(1.005, 0), (1.015, 0), (1.025, 1), (1.035, 1)])
def test_drafts_on_a_device_must_gain_two_percent(gain: float, best: int) -> None:
    depths = DeviceDepths(1, 0)
    sequence = depths.acceptance(0.0)
    for drafted in (0, 1):
        depths.observe(1 + drafted, drafted, 0.003 * (1.0 + sequence.survival()[0]) ** drafted / gain**drafted)
    depths.tried()
    chosen = [depths.next_depth([sequence]) for _ in range(200)]  # drafts that do not pay end after a while
    assert chosen[-1] == best


def test_trials_measure_the_first_draft_apart_from_those_after_it() -> None:
    """The first draft takes 2 ms, each further one 50 us. Were each to take half of the first, few would pay."""
    depths = DeviceDepths(16, 3)
    for number, drafted in itertools.product((1, 4, 16), TRIAL_DEPTHS):
        depths.observe(number * (1 + drafted), drafted, 0.003 + (drafted > 0) * 0.002 + drafted * 0.00005)
    depths.tried()
    sequence = depths.acceptance(0.0)
    for num_accepted in (0, 1, 3, 8, 16) * 80:  # the rate is at least a half at every position
        sequence.observe(16, num_accepted)
    assert depths.next_depth([depths.acceptance(0.0)]) > 8


class TestStepsBeforeTheFirstRequest:
    def profiled(self, seconds: float) -> tuple[list[tuple[int, float]], list[int]]:
        """Returns the times of steps that take `seconds`, or ten times as long if they compile, and all steps' rows."""
        ran: list[int] = []
        now = 0.0

        def time_step(num_rows: int) -> float:
            nonlocal now
            now += seconds
            ran.append(num_rows)
            return seconds if ran.count(num_rows) > 1 else 10 * seconds

        return list(profile_steps(time_step, 2**20, lambda: now)), ran

    def test_run_often_enough_to_forget_the_one_that_compiled(self) -> None:
        times, ran = self.profiled(0.1)
        assert {seconds for _, seconds in times} == {0.1}
        assert ran.count(1) in (2, 3, 4)

    def test_last_for_a_second_and_a_half(self) -> None:
        _, ran = self.profiled(0.1)
        assert len(ran) * 0.1 == pytest.approx(1.5, abs=0.35)
