"""Step times are learned where steps were seen, and follow sensibly where none were."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.speculation.costs import DraftStep, LinkCosts
from cluster.speculation.learned_curve import LearnedCurve


def curve_of(points: dict[int, float], repeats: int = 50) -> LearnedCurve:
    curve = LearnedCurve(256)
    for _ in range(repeats):
        for count, seconds in points.items():
            curve.observe(count, seconds)
    return curve


def test_points_are_met() -> None:
    curve = curve_of({1: 0.020, 4: 0.024, 16: 0.050, 64: 0.180})
    assert curve.at(np.array([1, 4, 16, 64])) == pytest.approx([0.020, 0.024, 0.050, 0.180], rel=0.05)


def test_between_the_knots_both_learn() -> None:
    curve = curve_of({5: 0.030})
    assert float(curve.at(5)) == pytest.approx(0.030, rel=0.05)


def test_it_never_falls() -> None:
    curve = curve_of({8: 0.030, 16: 0.020, 32: 0.040})
    values = curve.at(np.arange(1, 257))
    assert (np.diff(values) >= 0).all()


def test_what_was_seen_last_holds_where_fewer_rows_seem_dearer() -> None:
    """As when other programs were in the way while steps were timed at start, and only larger ones came since."""
    curve = curve_of({1: 0.040, 64: 0.140, 128: 0.170})
    for _ in range(40):
        curve.observe(128, 0.100)
        curve.observe(256, 0.180)
    assert float(curve.at(128)) == pytest.approx(0.100, rel=0.05)
    assert float(curve.at(64)) <= float(curve.at(128))


@pytest.mark.parametrize(("growth", "noise"), [(0.0, 0.03), (0.0025, 0.03), (0.01, 0.1)])
def test_it_stays_where_it_is_however_long_it_runs(growth: float, noise: float) -> None:
    """Knots that hardly differ contradict each other in every other step: a stream of k = 5 and a plain step in 12."""
    rng = np.random.default_rng(3)

    def seconds(rows: int) -> float:
        return float(0.020 * (1.0 + growth * rows) * rng.lognormal(0.0, noise))

    curve = curve_of({2**power: seconds(2**power) for power in range(12)})
    for step in range(20_000):
        rows = 1 if step % 12 == 0 else 6
        curve.observe(rows, seconds(rows))
        if step % 100 == 0:
            assert curve.seconds(6) == pytest.approx(0.020 * (1.0 + 6 * growth), rel=0.25)


def test_steps_that_scatter_leave_the_shape_of_the_curve() -> None:
    """Steps scatter as a target's do: by 6 %, and one in forty is slower by up to a factor of two.

    The ratio of two knots decides about a depth. The larger knot is seen in one step of twenty.
    """
    seconds = {4: 0.0140, 12: 0.0143, 16: 0.0176, 24: 0.0268, 32: 0.0362}
    true_ratio = seconds[24] / seconds[16]
    errors = []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        curve = curve_of(seconds)
        for step in range(4000):
            rows = int(rng.choice(list(seconds), p=[0.05, 0.425, 0.425, 0.05, 0.05]))
            slower = rng.uniform(1.2, 2.2) if rng.random() < 0.025 else 1.0
            curve.observe(rows, float(seconds[rows] * slower * rng.lognormal(0.0, 0.06)))
            if step % 16 == 0:
                errors.append(curve.seconds(24) / curve.seconds(16) / true_ratio - 1.0)
    assert np.std(errors) < 0.05


def test_a_knot_that_was_timed_wrongly_at_start_is_known_after_ten_steps_of_its_own() -> None:
    """Though it is seen in one step of twenty."""
    seconds = {4: 0.0140, 12: 0.0143, 16: 0.0176, 24: 0.0268, 32: 0.0362}
    curve = curve_of(seconds | {32: 3 * seconds[32]}, repeats=1)
    rng = np.random.default_rng(1)
    for step in range(240):
        rows = 32 if step % 20 == 0 else (12, 16)[step % 2]
        curve.observe(rows, float(seconds[rows] * rng.lognormal(0.0, 0.06)))
    assert curve.seconds(32) == pytest.approx(seconds[32], rel=0.15)


def test_knots_that_contradict_each_other_do_not_run_away() -> None:
    """Were what they have in common left in them, numbers would overflow after three hours of steps of 20 ms."""
    seconds = {1: 0.030, 6: 0.020, 16: 0.015}
    rng = np.random.default_rng(0)
    curve = curve_of(seconds, repeats=1)
    rows = rng.choice(list(seconds), size=700_000, p=[1 / 23, 11 / 23, 11 / 23]).tolist()
    for count, noise in zip(rows, rng.lognormal(0.0, 0.08, len(rows)).tolist(), strict=True):
        curve.observe(count, seconds[count] * noise)
    assert 0.010 < curve.seconds(16) < 0.030


def test_beyond_what_was_seen_the_last_slope_goes_on() -> None:
    curve = curve_of({1: 0.010, 64: 0.064, 128: 0.128})
    assert float(curve.at(256)) == pytest.approx(0.256, rel=0.1)


def test_a_step_a_little_larger_says_little_of_one_far_larger() -> None:
    curve = curve_of({1: 0.010, 32: 0.032, 64: 0.064})
    for _ in range(3):
        curve.observe(67, 0.067)
    assert float(curve.at(96)) == pytest.approx(0.096, rel=0.05)


def test_what_a_large_step_shifts_a_small_one_takes_back() -> None:
    """As when a dozen steps with drafts come between two plain ones."""
    curve = curve_of({1: 0.010, 64: 0.064, 96: 0.096})
    for _ in range(8):
        for _ in range(12):
            curve.observe(96, 0.130)
        curve.observe(64, 0.064)
    assert float(curve.at(64)) == pytest.approx(0.064, rel=0.08)
    assert float(curve.at(96)) == pytest.approx(0.130, rel=0.05)


def test_it_follows_a_change() -> None:
    curve = curve_of({4: 0.020})
    for _ in range(40):
        curve.observe(4, 0.040)
    assert float(curve.at(4)) == pytest.approx(0.040, rel=0.05)


def test_one_slow_step_moves_it_little() -> None:
    curve = curve_of({4: 0.020})
    curve.observe(4, 2.0)
    assert float(curve.at(4)) < 0.030


def test_nothing_is_known_at_first_and_something_after_one_observation() -> None:
    curve = LearnedCurve(64)
    assert not curve.is_known
    curve.observe(4, 0.020)
    assert curve.is_known
    assert curve.seconds(4) == pytest.approx(0.020)


def link(round_trip: float, step: float, repeats: int = 50, max_depth: int = 1) -> LinkCosts:
    costs = LinkCosts(64, max_depth)
    for _ in range(repeats):
        costs.observe_reply(round_trip, DraftStep(step, 1, 1))
    return costs


def test_a_proposal_takes_the_round_trip_and_its_steps() -> None:
    assert link(0.010, 0.002).proposal_seconds(5, 1) == pytest.approx(0.020, rel=0.05)


@pytest.mark.parametrize("place", [0, 1, 5])
@pytest.mark.parametrize("seconds", [0.100, 0.0])
def test_one_of_the_first_replies_tells_nothing(place: int, seconds: float) -> None:
    """It was held up, or crossed a message that was on its way."""
    costs = LinkCosts(64)
    for index in range(7):
        costs.observe_reply(seconds if index == place else 0.005, DraftStep(0.002, 1, 1))
    assert costs.round_trip_seconds == pytest.approx(0.005)


def test_a_link_that_grows_slower_is_known_to_be() -> None:
    costs = link(0.001, 0.002)
    for _ in range(60):
        costs.observe_reply(0.010, DraftStep(0.002, 1, 1))
    assert costs.round_trip_seconds == pytest.approx(0.010, rel=0.05)


def test_shallow_proposals_teach_what_deeper_ones_would_take() -> None:
    costs = LinkCosts(64)
    for batch in (4, 8, 16, 32):  # 0.1 ms a row; the first step of a proposal has three rows for two sequences
        for _ in range(30):
            costs.observe_reply(0.0, DraftStep(0.0001 * 1.5 * batch, batch, batch * 3 // 2, is_first=True))
    first, level = 0.0001 * 1.5 * 16, 0.0001 * 16
    assert costs.proposal_seconds(1, 16) == pytest.approx(first, rel=0.05)
    assert costs.proposal_seconds(4, 16) == pytest.approx(first + 3 * level, rel=0.05)
    waits = costs.wait_seconds(np.array([0, 1, 4]), np.full(3, 16))
    assert waits == pytest.approx([0.0, costs.proposal_seconds(1, 16), costs.proposal_seconds(4, 16)])


def test_a_drafter_that_makes_proposals_in_one_step_takes_as_long_for_each_depth() -> None:
    costs = LinkCosts(64, 8, is_one_pass=True)
    for _ in range(30):
        costs.observe_reply(0.010, DraftStep(0.002, 4, 36, is_first=True))
    assert costs.proposal_seconds(1, 4) == costs.proposal_seconds(8, 4) == pytest.approx(0.012, rel=0.05)
    assert costs.wait_seconds(np.array([0, 1, 8]), np.full(3, 4)) == pytest.approx([0.0, 0.012, 0.012], rel=0.05)
    for _ in range(400):
        costs.observe_ready([8, 8, 8, 8], [8, 8, 8, 8])
    assert costs.wait_seconds(np.array([8]), np.array([4])) == pytest.approx([0.0], abs=1e-4)


def test_batches_that_were_never_seen_are_not_taken_to_be_dearer() -> None:
    costs = LinkCosts(64)
    for batch in (1, 2):
        costs.observe_reply(0.0, DraftStep(0.001 * batch, batch, batch))
    assert costs.proposal_seconds(1, 64) == pytest.approx(costs.proposal_seconds(1, 2))
    costs.observe_reply(0.0, DraftStep(0.01, 64, 64))
    assert costs.proposal_seconds(1, 64) > 2 * costs.proposal_seconds(1, 2)


def test_no_depth_no_wait() -> None:
    assert link(0.010, 0.002).wait_seconds(np.array([0, 5]), np.array([0, 1]))[0] == 0.0


def test_what_runs_ahead_is_not_waited_for() -> None:
    costs = link(0.010, 0.002, max_depth=8)
    for _ in range(400):
        costs.observe_ready([5], [5])
    assert costs.wait_seconds(np.array([5]), np.array([1]))[0] < 0.001
    assert costs.proposal_seconds(5, 1) == pytest.approx(0.020, rel=0.05)


def test_a_step_of_many_waits_for_the_levels_that_some_lack() -> None:
    costs = link(0.010, 0.002, max_depth=8)
    for _ in range(400):
        costs.observe_ready([4, 4, 2, 0], [4, 4, 4, 4])
    assert costs.ready_shares[:4] == pytest.approx([0.75, 0.75, 0.5, 0.5], abs=0.01)
    one, four = costs.wait_seconds(np.array([4, 4]), np.array([1, 4]))
    assert one == pytest.approx(0.5 * 0.010 + (0.25 + 0.25 + 0.5 + 0.5) * 0.002, rel=0.05)
    lack = [1 - share**4 for share in (0.75, 0.75, 0.5, 0.5)]
    assert four == pytest.approx(lack[-1] * 0.010 + sum(lack) * 0.002, rel=0.05)


def test_levels_that_were_not_asked_for_are_taken_to_be_there_as_often_as_those_before_them() -> None:
    costs = link(0.010, 0.002, max_depth=8)
    costs.observe_ready([0, 0], [3, 3])
    assert costs.ready_shares.tolist() == [0.0] * 8
    for _ in range(400):
        costs.observe_ready([3], [3])
    assert costs.ready_shares == pytest.approx(np.ones(8), abs=0.01)
