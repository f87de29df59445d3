"""The depth of drafts on the target's device is the one with the most tokens per second."""

from __future__ import annotations

import itertools

import pytest

from cluster.speculation.acceptance_model import SequenceAcceptance
from cluster.speculation.device_depths import DeviceDepths

MAX_DEPTH = 8


def seconds(num_rows: int, depth: int, level: float = 0.2e-3) -> float:
    """Returns the seconds of a step with linear costs: 3 ms, 5 us a row, and a first draft costs two further ones."""
    return 3e-3 + 5e-6 * num_rows + level * (depth + (depth > 0))


def tried(level: float = 0.2e-3) -> DeviceDepths:
    depths = DeviceDepths(MAX_DEPTH, initial_depth=3)
    for number, depth in itertools.product((1, 4, 16), (0, 1, 2, 4, 7)):
        depths.observe(number * (1 + depth), depth, seconds(number * (1 + depth), depth, level))
    depths.tried()
    return depths


def run(
    depths: DeviceDepths, sequences: list[SequenceAcceptance], num_steps: int, accepted: int, level: float = 0.2e-3
) -> list[int]:
    """Depths of `num_steps` steps in which every sequence has `accepted` drafts accepted, or all it has."""
    chosen = []
    for _ in range(num_steps):
        depth = depths.next_depth(sequences)
        chosen.append(depth)
        for sequence in sequences:
            if depth:
                sequence.observe(depth, min(depth, accepted))
        rows = len(sequences) * (1 + depth)
        depths.observe(rows, depth, seconds(rows, depth, level))
    return chosen


def test_drafts_that_are_accepted_are_made_as_deep_as_they_are() -> None:
    depths = tried()
    sequences = [depths.acceptance(0.0)]
    assert set(run(depths, sequences, 1000, accepted=4)[-500:]) == {4, 5}  # now and then one more
    assert run(depths, sequences, 4000, accepted=MAX_DEPTH)[-1] == MAX_DEPTH


def test_drafts_that_are_rejected_end_after_a_while_and_are_tried_again() -> None:
    depths = tried()
    chosen = run(depths, [depths.acceptance(1.0)], 10_000, accepted=0)
    assert chosen[0] > 0
    first_without = chosen.index(0)
    assert set(chosen[first_without - 100 : first_without]) == {1}
    share = sum(depth > 0 for depth in chosen[first_without:]) / len(chosen[first_without:])
    assert 0.02 < share < 0.1
    assert set(chosen[first_without:]) == {0, 1}


@pytest.mark.parametrize(("level", "least", "most"), [(0.02e-3, 6, MAX_DEPTH), (6e-3, 0, 1)])
def test_dearer_drafts_are_fewer(level: float, least: int, most: int) -> None:
    depths = tried(level)
    sequences = [depths.acceptance(0.0)]
    for turn in range(400):  # three of four drafts are right
        sequences[0].observe(MAX_DEPTH, (0, 2, 5, MAX_DEPTH)[turn % 4])
    assert least <= depths.next_depth(sequences) <= most


def test_a_step_that_was_disturbed_changes_little() -> None:
    depths, others = tried(), tried()
    for each in (depths, others):
        run(each, [each.acceptance(0.0)], 100, accepted=4)
    others.observe(5, 4, 0.5)
    sequences, same = [depths.acceptance(0.0)], [others.acceptance(0.0)]
    assert abs(depths.next_depth(sequences) - others.next_depth(same)) <= 1


def test_before_steps_were_tried_the_depth_stays_as_configured() -> None:
    depths = DeviceDepths(MAX_DEPTH, initial_depth=3)
    assert depths.next_depth([depths.acceptance(0.0)]) == 3


def test_two_drafts_that_are_always_right_pay_for_a_step_of_less_than_three_times_the_time() -> None:
    depths = tried(1.2e-3)  # a step with two drafts takes 6.6 ms in place of 3 ms
    sequences = [depths.acceptance(0.0)]
    for _ in range(400):
        sequences[0].observe(MAX_DEPTH, 2)
    assert depths.next_depth(sequences) == 2
