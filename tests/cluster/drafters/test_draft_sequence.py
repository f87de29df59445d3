from __future__ import annotations

import random

import pytest

from cluster.drafters.base import DraftSequence
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams


def new_sequence(committed: list[int], drafts: list[int]) -> DraftSequence:
    """A sequence that has drafted `drafts` past `committed`."""
    sequence = DraftSequence(list(committed), 1, SamplingParams(), NoiseKey(0, 0), num_speculative_tokens=4, window=10)
    sequence.token_ids.extend(drafts)
    return sequence


def test_starts_with_everything_committed() -> None:
    sequence = new_sequence([1, 2, 3], [])
    assert (sequence.num_committed, sequence.num_drafted, sequence.draft_token_ids) == (3, 0, [])


@pytest.mark.parametrize(
    ("drafts", "base", "news", "kept", "num_committed", "token_ids"),
    [
        # All of it came true: nothing is gone, and the drafts past it stay.
        ([4, 5, 6, 7], 3, [4, 5], 7, 5, [1, 2, 3, 4, 5, 6, 7]),
        ([4, 5], 3, [4, 5], 5, 5, [1, 2, 3, 4, 5]),
        # A draft was wrong: what follows it goes with it.
        ([4, 5, 6, 7], 3, [4, 9], 4, 5, [1, 2, 3, 4, 9]),
        ([4, 5, 6, 7], 3, [9], 3, 4, [1, 2, 3, 9]),
        ([4, 5, 6, 7], 3, [4, 9, 6], 4, 6, [1, 2, 3, 4, 9, 6]),  # agreeing again later does not count
        # The target ran past the drafts.
        ([4, 5], 3, [4, 5, 6], 5, 6, [1, 2, 3, 4, 5, 6]),
        ([], 3, [4], 3, 4, [1, 2, 3, 4]),
        # News that overlaps with what is known.
        ([4, 5], 2, [3, 4], 5, 4, [1, 2, 3, 4, 5]),
        ([4, 5], 1, [2, 3, 9], 3, 4, [1, 2, 3, 9]),
        # A repetition.
        ([4, 5], 3, [], 5, 3, [1, 2, 3, 4, 5]),
        ([4, 5], 1, [2, 3], 5, 3, [1, 2, 3, 4, 5]),
        # Older than what is known.
        ([4, 5], 1, [2], None, 3, [1, 2, 3, 4, 5]),
        ([4, 5], 0, [], None, 3, [1, 2, 3, 4, 5]),
    ],
)
def test_commit_keeps_what_came_true(
    drafts: list[int], base: int, news: list[int], kept: int | None, num_committed: int, token_ids: list[int]
) -> None:
    sequence = new_sequence([1, 2, 3], drafts)
    assert sequence.commit(base, news) == kept
    assert sequence.num_committed == num_committed
    assert sequence.token_ids == token_ids


@pytest.mark.parametrize(("base", "is_behind"), [(0, False), (3, False), (4, True)])
def test_is_behind_when_tokens_before_the_base_are_unknown(base: int, is_behind: bool) -> None:
    """Drafts are no substitute for being told."""
    assert new_sequence([1, 2, 3], [4, 5]).is_behind(base) is is_behind


@pytest.mark.parametrize("seed", range(20))
def test_cumulative_news_may_be_lost_repeated_or_late(seed: int) -> None:
    """Whatever arrives, the committed tokens are the target's, and what is said to be kept is as it was."""
    choose = random.Random(seed)
    truth = [choose.randrange(3) for _ in range(200)]
    sequence = new_sequence(truth[:3], [])
    committed, told = 3, 3
    messages: list[tuple[int, list[int]]] = []
    for _ in range(150):
        committed = min(committed + choose.randint(1, 3), len(truth))
        messages.append((told, truth[told:committed]))
        if choose.random() < 0.4:
            continue  # overtaken before it was sent
        for base, news in [messages[-1], *choose.sample(messages, min(len(messages), choose.randint(0, 2)))]:
            sequence.token_ids.extend(choose.randrange(3) for _ in range(choose.randint(0, 4)))
            before = list(sequence.token_ids)
            kept = sequence.commit(base, news)
            assert sequence.token_ids[: sequence.num_committed] == truth[: sequence.num_committed]
            if kept is None:
                assert sequence.token_ids == before
            else:
                assert sequence.token_ids[:kept] == before[:kept]
                assert kept < len(sequence.token_ids) or sequence.token_ids == before
        assert sequence.num_committed == committed
        told = choose.choice([told, sequence.num_committed])
