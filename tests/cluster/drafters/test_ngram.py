"""Prompt lookup: what it proposes, that it stops when it knows nothing, and that it never repeats a mistake."""

from __future__ import annotations

import pytest

from cluster.drafters.base import DraftSequence
from cluster.drafters.ngram import NgramDrafter
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams


def admitted(drafter: NgramDrafter, token_ids: list[int], window: int = 4) -> DraftSequence:
    sequence = DraftSequence(
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        params=SamplingParams(),
        noise_key=NoiseKey(1, 2),
        num_speculative_tokens=window,
        window=window,
    )
    assert drafter.admit(sequence)
    return sequence


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        ([1, 2, 3, 4, 5, 9, 1, 2], [3, 4, 5, 9]),
        ([1, 2, 3, 1, 2, 4, 7, 1, 2], [4, 7, 1, 2]),  # the latest of equals
        ([8, 1, 2, 3, 9, 1, 2, 4, 8, 1, 2], [3, 9, 1, 2]),  # the longest before the latest
        ([5, 6, 5, 6], [5, 6, 5, 6]),  # a match that reaches the end goes round
        ([7, 7], [7, 7, 7, 7]),
    ],
)
def test_proposes_what_followed_before(token_ids: list[int], expected: list[int]) -> None:
    drafter = NgramDrafter(vocab_size=10, max_model_len=100, shortest=1, longest=3)
    sequence = admitted(drafter, token_ids)
    assert drafter.draft([sequence]) == []
    assert sequence.draft_token_ids == expected


@pytest.mark.parametrize("token_ids", [[1], [1, 2, 3], [5, 1, 5, 2]])
def test_is_exhausted_where_nothing_is_known(token_ids: list[int]) -> None:
    drafter = NgramDrafter(vocab_size=10, max_model_len=100, shortest=2, longest=3)
    sequence = admitted(drafter, token_ids)
    drafter.draft([sequence])
    assert sequence.draft_token_ids == []
    assert sequence.is_exhausted
    sequence.commit(len(token_ids), token_ids[:2])
    assert not sequence.is_exhausted


def test_learns_from_what_was_committed_only() -> None:
    drafter = NgramDrafter(vocab_size=10, max_model_len=100, shortest=1, longest=2)
    sequence = admitted(drafter, [1, 2, 3, 1])
    drafter.draft([sequence])
    assert sequence.draft_token_ids == [2, 3, 1, 2]
    kept = sequence.commit(4, [2, 9, 1])  # the target said 9 where 3 was proposed
    assert kept == [0]
    drafter.rewind(sequence, kept)
    drafter.draft([sequence])
    assert sequence.draft_token_ids == [2, 9, 1, 2]


def test_stays_within_the_models_length() -> None:
    drafter = NgramDrafter(vocab_size=10, max_model_len=6, shortest=1, longest=2)
    sequence = admitted(drafter, [1, 2, 1, 2])
    drafter.draft([sequence])
    assert sequence.token_ids == [1, 2, 1, 2, 1, 2]
