from __future__ import annotations

import pytest

from cluster.speculation.acceptance import count_accepted


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
