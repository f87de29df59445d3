from __future__ import annotations

import pytest

from cluster.engine.sequence import FinishReason, Sequence

EOS = 0


def new_sequence(length: int, max_len: int, *, k: int = 4, computed: int = 0, eos: frozenset[int] = frozenset({EOS})):
    return Sequence([9] * length, length, max_len, eos, k, num_computed_tokens=computed)


@pytest.mark.parametrize(
    ("max_len", "committed", "appended", "finish_reason"),
    [
        (20, [1], [1], None),
        (20, [1, 2, 3], [1, 2, 3], None),
        (20, [EOS], [EOS], FinishReason.STOP),
        (20, [1, EOS, 2], [1, EOS], FinishReason.STOP),  # drafts past the end are not committed
        (13, [1, 2, 3], [1, 2, 3], FinishReason.LENGTH),
        (12, [1, 2, 3], [1, 2], FinishReason.LENGTH),
        (12, [1, EOS, 3], [1, EOS], FinishReason.STOP),  # an end on the last place is an end
        (11, [EOS], [EOS], FinishReason.STOP),
    ],
)
def test_commits_up_to_where_the_sequence_ends(
    max_len: int, committed: list[int], appended: list[int], finish_reason: FinishReason | None
) -> None:
    sequence = new_sequence(10, max_len)
    assert sequence.commit(committed) == len(appended)
    assert sequence.token_ids == [9] * 10 + appended
    assert sequence.finish_reason is finish_reason


def test_an_end_of_sequence_token_can_be_ignored() -> None:
    sequence = new_sequence(10, 20, eos=frozenset())
    assert sequence.commit([EOS, EOS]) == 2
    assert sequence.finish_reason is None


@pytest.mark.parametrize(
    ("length", "max_len", "k", "drafts"),
    [(10, 20, 4, 4), (10, 15, 4, 4), (10, 14, 4, 3), (10, 12, 4, 1), (10, 11, 4, 0), (10, 10, 4, 0), (10, 20, 0, 0)],
)
def test_the_bonus_token_takes_the_last_place(length: int, max_len: int, k: int, drafts: int) -> None:
    assert new_sequence(length, max_len, k=k).max_useful_drafts == drafts


@pytest.mark.parametrize(
    ("length", "computed", "is_prefilling"), [(1, 0, False), (2, 0, True), (5, 3, True), (5, 4, False)]
)
def test_prefilling_lasts_until_only_the_last_token_is_left(length: int, computed: int, is_prefilling: bool) -> None:
    assert new_sequence(length, 20, computed=computed).is_prefilling is is_prefilling
