"""Prompt lookup: what it proposes, that it stops when it knows nothing, and that it never repeats a mistake."""

from __future__ import annotations

import pytest

from cluster.drafters.base import DraftSequence
from cluster.drafters.ngram import NgramDrafter
from cluster.engine.limits import StepLimits
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams


def new_drafter(max_model_len: int, max_num_seqs: int = 8) -> NgramDrafter:
    return NgramDrafter(10, StepLimits(max_model_len, max_num_seqs, 512))


def admitted(drafter: NgramDrafter, token_ids: list[int], window: int = 4) -> DraftSequence:
    sequence = DraftSequence(
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        params=SamplingParams(),
        noise_key=NoiseKey(1, 2),
        num_owed=window,
        window=window,
    )
    assert drafter.admit(sequence)
    return sequence


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        ([1, 2, 3, 4, 5, 9, 1, 2], [3, 4, 5, 9]),
        ([1, 2, 3, 1, 2, 4, 7, 1, 2], [4, 7, 1, 2]),  # the latest of equals
        ([7, 8, 1, 2, 3, 9, 1, 2, 4, 7, 8, 1, 2], [3, 9, 1, 2]),  # the longest before the latest
        ([5, 6, 5, 6], [5, 6, 5, 6]),  # a match that reaches the end goes round
        ([7, 7], [7, 7, 7, 7]),
    ],
)
def test_proposes_what_followed_before(token_ids: list[int], expected: list[int]) -> None:
    drafter = new_drafter(max_model_len=100)
    sequence = admitted(drafter, token_ids)
    assert drafter.draft([sequence]) == []
    assert sequence.draft_token_ids == expected


@pytest.mark.parametrize("token_ids", [[1], [1, 2, 3], [5, 1, 5, 2]])
def test_is_exhausted_where_nothing_is_known(token_ids: list[int]) -> None:
    drafter = new_drafter(max_model_len=100)
    sequence = admitted(drafter, token_ids)
    drafter.draft([sequence])
    assert sequence.draft_token_ids == []
    assert sequence.is_exhausted
    sequence.commit(len(token_ids), token_ids[:2])
    assert not sequence.is_exhausted


def test_a_long_prompt_is_taken_in_over_several_steps_and_a_short_one_does_not_wait_for_it() -> None:
    drafter = new_drafter(max_model_len=10_000)  # 512 tokens a step
    long, short = admitted(drafter, [*range(600), *range(600)]), admitted(drafter, [1, 2, 1])
    for _ in range(2):
        drafter.draft([long, short])
        assert (short.draft_token_ids, long.draft_token_ids) == ([2, 1, 2, 1], [])
    drafter.draft([long, short])
    assert long.draft_token_ids == [0, 1, 2, 3]


def test_learns_from_what_was_committed_only() -> None:
    drafter = new_drafter(max_model_len=100)
    sequence = admitted(drafter, [1, 2, 3, 1])
    drafter.draft([sequence])
    assert sequence.draft_token_ids == [2, 3, 1, 2]
    kept = sequence.commit(4, [2, 9, 1])  # the target said 9 where 3 was proposed
    assert kept == [0]
    drafter.rewind(sequence, kept)
    drafter.draft([sequence])
    assert sequence.draft_token_ids == [2, 9, 1, 2]


def test_stays_within_the_models_length() -> None:
    drafter = new_drafter(max_model_len=6)
    sequence = admitted(drafter, [1, 2, 1, 2])
    drafter.draft([sequence])
    assert sequence.token_ids == [1, 2, 1, 2, 1, 2]


def test_takes_as_many_sequences_as_it_may() -> None:
    drafter = new_drafter(max_model_len=100, max_num_seqs=2)
    first, second = admitted(drafter, [1, 2]), admitted(drafter, [3, 4])
    third = DraftSequence([5], 1, SamplingParams(), NoiseKey(1, 2), 4, 4)
    assert drafter.free_tokens == 0
    assert not drafter.admit(third)
    drafter.release(first)
    assert drafter.free_tokens is None
    assert drafter.admit(third)
    drafter.release(second)
