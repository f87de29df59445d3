"""Which nodes run-ahead takes, and how many rows of a step."""

from __future__ import annotations

import pytest

from cluster.drafters.base import DraftSequence
from cluster.drafting.run_ahead import Frontier, RunAhead, num_nodes_ahead, tree_nodes
from cluster.speculation.drafts import path_to
from cluster.speculation.learned_curve import LearnedCurve
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams

K, WINDOW = 3, 8


def new_sequence(num_extended: int = K, gaps: tuple[float, ...] = (1.0,) * 20) -> DraftSequence:
    """Its main path was extended so often; `gaps` of the second best along it."""
    sequence = DraftSequence([1], 1, SamplingParams(), NoiseKey(0, 0), num_owed=K, window=WINDOW, width=2)
    for position in range(num_extended):
        sequence.extend(sequence.tip, [position, 100 + position], [0.0, gaps[position]])
    return sequence


def chances(sequence: DraftSequence, run_ahead: RunAhead) -> dict[int, float]:
    frontier = Frontier(sequence, run_ahead)
    frontier.follow()
    return {node: frontier.chances[node] for node in frontier.nodes}


def runner_up(sequence: DraftSequence, position: int) -> int:
    return sequence.children([-1, *path_to(sequence.tip, sequence.parents)][position])[1]


def test_without_branches_only_the_main_path_goes_on() -> None:
    sequence = new_sequence(0)
    for _ in range(WINDOW):
        assert chances(sequence, RunAhead(0)).keys() == {sequence.tip}
        sequence.append(5)
    assert chances(sequence, RunAhead(0)) == {}


def test_branches_start_at_each_outcome_and_the_likeliest_where_the_scores_are_close() -> None:
    sequence = new_sequence(gaps=(3.0, 0.1, 2.0))
    found = chances(sequence, RunAhead(1))
    assert [*found] == [
        sequence.tip,
        runner_up(sequence, 1),
        runner_up(sequence, 2),
        runner_up(sequence, 0),
    ]


def test_branches_are_likeliest_where_drafts_were_rejected() -> None:
    """With equal gaps the earliest branch is likeliest at first, as it is certain to be reached."""
    run_ahead, sequence = RunAhead(1), new_sequence()
    branches = [runner_up(sequence, position) for position in range(K)]
    found = chances(sequence, run_ahead)
    assert max(branches, key=found.__getitem__) == branches[0]
    for _ in range(100):
        assert run_ahead.observe(sequence, [0, 1, 9]) == "rejected_at_2"
    found = chances(sequence, run_ahead)
    assert max(branches, key=found.__getitem__) == branches[2]


def test_a_next_best_is_as_likely_as_it_was_right() -> None:
    run_ahead, sequence = RunAhead(1), new_sequence()
    for _ in range(3000):
        for news in (
            [0, 1, 2, 9],
            [0, 101],
            [0, 9],
            [0, 9],
            [0, 9],
        ):  # of four at the second place one is the next best
            run_ahead.observe(sequence, news)
    assert run_ahead.stays(sequence, -1) == pytest.approx(1.0, abs=0.01)
    assert run_ahead.chances(sequence, sequence.children(-1)[0]) == pytest.approx([1 / 5, 4 / 5 / 4], abs=0.02)


def test_a_branch_goes_on_along_its_best_child_and_ends_as_deep_as_a_proposal() -> None:
    run_ahead, sequence = RunAhead(1), new_sequence()
    node = branch = runner_up(sequence, 0)
    for _ in range(K):
        assert node in chances(sequence, run_ahead)
        sequence.extend(node, [7, 8], [0.0, 1.0])
        node = sequence.children(node)[0]
    assert not sequence.missing(100, branch)
    left = chances(sequence, run_ahead).keys()
    assert left == {sequence.tip, runner_up(sequence, 1), runner_up(sequence, 2)}


def test_the_runner_up_of_the_bonus_token_is_a_branch_too_and_those_after_it_are_not() -> None:
    sequence = new_sequence(K + 3)
    branches = {runner_up(sequence, position) for position in range(K + 1)}
    assert chances(sequence, RunAhead(1)).keys() == branches | {sequence.tip}


def test_nodes_are_followed_after_a_round_has_kept_some() -> None:
    run_ahead, sequence = RunAhead(1), new_sequence(K + 2)
    sequence.extend(runner_up(sequence, 2), [7, 8], [0.0, 1.0])
    assert sequence.commit(1, [0]) is not None
    assert chances(sequence, run_ahead).keys() == {
        sequence.tip,
        runner_up(sequence, 0),
        sequence.children(runner_up(sequence, 1))[0],
        *(runner_up(sequence, position) for position in (2, 3)),
    }


def test_of_trees_those_after_the_likely_outcomes_are_completed() -> None:
    sequence = new_sequence(1)
    sequence.shape = (-1, 0, -1)
    sequence.num_owed = 3
    assert tree_nodes(sequence, RunAhead(1)).keys() == {sequence.tip, runner_up(sequence, 0)}


class TestRows:
    @staticmethod
    def curve(*seconds: tuple[int, float]) -> LearnedCurve:
        curve = LearnedCurve(256)
        for _ in range(50):
            for rows, time in seconds:
                curve.observe(rows, time)
        return curve

    @staticmethod
    def taken(chances: list[float], num_owed: int, curve: LearnedCurve, rows: int = 1) -> int:
        """Each node has this number of `rows`."""
        return num_nodes_ahead(chances, [rows] * len(chances), num_owed, num_owed * rows, curve)

    def test_are_as_many_as_cost_nothing(self) -> None:
        assert self.taken([0.1] * 40, 8, self.curve((1, 1.0), (64, 1.0))) == 40

    def test_beside_what_is_owed_are_those_that_hardly_lengthen_the_step(self) -> None:
        curve = self.curve((8, 1.0), (48, 2.0))  # each row 2.5 % of a step of 8
        assert self.taken([0.9] * 40, 8, curve) in (3, 4)

    def test_of_a_step_that_nobody_waits_for_are_those_that_are_worth_their_time(self) -> None:
        curve = self.curve((1, 1.0), (64, 64.0))  # each as long as the first
        assert self.taken([0.5, 0.4, 0.1], 0, curve) == 1
        flatter = self.curve((1, 1.0), (64, 7.3))  # each a tenth of it
        assert self.taken([0.5, 0.4, 0.01], 0, flatter) == 2

    def test_of_several_each_lengthen_the_step_by_all_of_them(self) -> None:
        curve = self.curve((8, 1.0), (48, 2.0))
        assert self.taken([0.9] * 40, 2, curve, rows=4) == 0
        assert self.taken([0.9] * 40, 8, curve) > 0

    def test_are_all_before_anything_is_known(self) -> None:
        assert self.taken([0.5] * 3, 0, LearnedCurve(64)) == 3
        assert self.taken([], 0, LearnedCurve(64)) == 0


@pytest.mark.parametrize(
    ("news", "kind"),
    [
        ([9], "rejected_at_0"),
        ([0, 9], "rejected_at_1"),
        ([0, 1, 2, 9], "all_accepted"),
        ([0, 1, 2, 3], "all_accepted"),
        ([9] * 10_000, "rejected_at_64"),  # as many kinds as there may be
        ([9, 9, 9], "rejected_at_2"),  # news of several rounds: some place that is none of the proposal's
    ],
)
def test_the_kind_of_an_outcome(news: list[int], kind: str) -> None:
    assert RunAhead(1).observe(new_sequence(K + 2), news) == kind
