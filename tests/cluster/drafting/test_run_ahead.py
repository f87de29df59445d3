"""Which nodes run-ahead takes, and when it begins no step."""

from __future__ import annotations

import math

import pytest

from cluster.drafters.base import DraftSequence
from cluster.drafting.run_ahead import RunAhead, Verification
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams

K, WINDOW = 3, 8


def new_sequence(num_extended: int = K, gaps: tuple[float, ...] = (1.0,) * 20) -> DraftSequence:
    """Its main path was extended so often; `gaps` of the second best along it."""
    sequence = DraftSequence([1], 1, SamplingParams(), NoiseKey(0, 0), num_speculative_tokens=K, window=WINDOW, width=2)
    for position in range(num_extended):
        sequence.extend(sequence.tip, [position, 100 + position], [0.0, gaps[position]])
    return sequence


def runner_up(sequence: DraftSequence, position: int) -> int:
    return sequence.children(sequence.main_node(position))[1]


def test_without_branches_only_the_main_path_goes_on() -> None:
    sequence = new_sequence()
    assert RunAhead(0).nodes([sequence], 100) == {sequence: [sequence.tip]}
    assert RunAhead(0).nodes([new_sequence(WINDOW)], 100) == {}


def test_branches_start_where_the_scores_are_close() -> None:
    sequence = new_sequence(gaps=(3.0, 0.1, 2.0))
    (nodes,) = RunAhead(2).nodes([sequence], 100).values()
    assert nodes == [sequence.tip, runner_up(sequence, 1), runner_up(sequence, 2)]


def test_branches_start_where_drafts_were_rejected() -> None:
    """Of equal gaps: at first the earliest, which is reached for certain."""
    run_ahead, sequence = RunAhead(1), new_sequence()
    assert list(run_ahead.nodes([sequence], 100).values()) == [[sequence.tip, runner_up(sequence, 0)]]
    for _ in range(100):
        assert run_ahead.observe(sequence, [0, 1, 9]) == "rejected_at_2"
    assert list(run_ahead.nodes([sequence], 100).values()) == [[sequence.tip, runner_up(sequence, 2)]]


def test_a_branch_goes_on_along_its_best_child_and_ends_as_deep_as_a_proposal() -> None:
    run_ahead, sequence = RunAhead(1), new_sequence(gaps=(0.0, 9.0, 9.0))
    branch = runner_up(sequence, 0)
    for depth in range(K):
        (nodes,) = run_ahead.nodes([sequence], 100).values()
        assert sequence.depth(nodes[1]) == 1 + depth
        sequence.extend(nodes[1], [7, 8], [0.0, 1.0])
    (nodes,) = run_ahead.nodes([sequence], 100).values()
    assert nodes[1] == runner_up(sequence, 1)
    assert not sequence.missing(100, branch)


def test_the_runner_up_of_the_bonus_token_is_a_branch_too() -> None:
    sequence = new_sequence(K + 1, gaps=(9.0, 9.0, 9.0, 0.0))
    (nodes,) = RunAhead(1).nodes([sequence], 100).values()
    assert nodes == [sequence.tip, runner_up(sequence, K)]


def test_nothing_goes_beyond_the_models_length() -> None:
    sequence = new_sequence()
    assert RunAhead(2).nodes([sequence], 1 + K + 1) == {
        sequence: [sequence.tip, runner_up(sequence, 0), runner_up(sequence, 1)]
    }
    assert RunAhead(2).nodes([sequence], 2) == {}


def test_branches_take_only_room_that_main_paths_leave() -> None:
    sequences = [new_sequence() for _ in range(60)]
    nodes = RunAhead(2).nodes(sequences, 100)
    assert [len(own) for own in nodes.values()] == [3, 3] + [1] * 58
    assert all(sequence.tip in own for sequence, own in nodes.items())


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


class TestTime:
    """Steps of 4 s; the target answers 10 s after a proposal."""

    @pytest.fixture
    def run_ahead(self) -> RunAhead:
        run_ahead = RunAhead(1)
        run_ahead.time_step(4.0)
        return run_ahead

    def closed(self, run_ahead: RunAhead, now: float, *sent_at: float) -> float:
        return run_ahead.closed_seconds(now, [Verification(new_sequence(), at, 10.0) for at in sent_at])

    def test_a_step_begins_while_there_is_time_for_it(self, run_ahead: RunAhead) -> None:
        assert self.closed(run_ahead, 5.0, 0.0) == 0.0
        assert self.closed(run_ahead, 5.0) == 0.0
        assert RunAhead(1).closed_seconds(9.0, [Verification(new_sequence(), 0.0, 10.0)]) == 0.0  # nothing is known yet

    def test_none_begins_when_the_target_is_about_to_answer(self, run_ahead: RunAhead) -> None:
        assert self.closed(run_ahead, 9.0, 0.0) == 11.0
        assert self.closed(run_ahead, 12.0, 0.0, 11.0) == 8.0

    def test_a_target_that_is_very_late_is_not_waited_for(self, run_ahead: RunAhead) -> None:
        assert self.closed(run_ahead, 20.5, 0.0) == 0.0

    def test_the_likelier_the_main_path_comes_true_the_later_a_step_may_begin(self, run_ahead: RunAhead) -> None:
        sequence = new_sequence(K + 1)
        for _ in range(2000):
            run_ahead.observe(sequence, [0, 1, 2, 3])
        assert self.closed(run_ahead, 9.0, 0.0) == 0.0
        assert math.isclose(run_ahead._chance(sequence.proposal_depth), 1.0, abs_tol=0.05)
