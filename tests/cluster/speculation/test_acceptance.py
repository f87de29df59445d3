from __future__ import annotations

import pytest

from cluster.speculation.acceptance import accepted_path, count_accepted


@pytest.mark.parametrize(
    ("drafts", "choices", "accepted"),
    [
        ([], [7], 0),
        ([7], [7, 8], 1),
        ([7], [6, 7], 0),
        ([1, 2, 3], [1, 2, 3, 4], 3),
        ([1, 2, 3], [1, 2, 9, 4], 2),
        ([1, 2, 3], [1, 9, 3, 4], 1),  # what follows a rejected draft does not count, even where it agrees
        ([1, 2, 3], [9, 2, 3, 4], 0),
        ([1, 2, 3], [0, 1, 2, 3], 0),  # agreeing one place further is not agreeing
        ([5, 5, 5], [5, 5, 5, 5], 3),
        ([0, 0], [0, 1, 0], 1),
    ],
)
def test_accepts_the_leading_drafts_that_equal_the_choices(
    drafts: list[int], choices: list[int], accepted: int
) -> None:
    assert count_accepted(drafts, choices) == accepted


def test_there_is_one_choice_more_than_drafts() -> None:
    with pytest.raises(AssertionError):
        count_accepted([1, 2], [1, 2])


@pytest.mark.parametrize(
    ("choices", "path"),
    [
        ([9, 0, 0, 0, 0, 0], [0]),
        ([1, 9, 0, 0, 0, 0], [0, 1]),
        ([2, 9, 7, 0, 0, 0], [0, 2]),
        ([1, 3, 0, 9, 0, 0], [0, 1, 3]),
        ([1, 4, 0, 9, 5, 9], [0, 1, 4, 5]),
        ([1, 5, 9, 9, 9, 9], [0, 1]),  # 5 is no child of node 1
    ],
)
def test_the_walk_through_a_tree_follows_the_targets_choices(choices: list[int], path: list[int]) -> None:
    """The tree 8 → (1 → (3, 4 → 5), 2)."""
    assert accepted_path([8, 1, 2, 3, 4, 5], [-1, 0, 0, 1, 1, 4], choices) == path


def test_a_chain_is_a_tree_of_width_one() -> None:
    drafts, choices = [4, 5, 6], [4, 5, 9, 9]
    path = accepted_path([3, *drafts], [-1, 0, 1, 2], choices)
    assert len(path) - 1 == count_accepted(drafts, choices) == 2
