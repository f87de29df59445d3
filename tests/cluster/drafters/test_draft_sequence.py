from __future__ import annotations

import random

import pytest

from cluster.drafters.base import DraftSequence
from cluster.speculation.drafts import Drafts
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams


def new_sequence(committed: list[int], drafts: list[int]) -> DraftSequence:
    """A sequence that has drafted `drafts` past `committed`."""
    sequence = DraftSequence(list(committed), 1, SamplingParams(), NoiseKey(0, 0), num_owed=4, window=10)
    for token in drafts:
        sequence.append(token)
    return sequence


def test_starts_with_everything_committed() -> None:
    sequence = new_sequence([1, 2, 3], [])
    assert (sequence.num_committed, sequence.num_drafted, sequence.draft_token_ids) == (3, 0, [])


@pytest.mark.parametrize(
    ("drafts", "base", "news", "kept", "num_committed", "token_ids"),
    [
        # All of it came true: nothing is gone, and the drafts past it stay.
        ([4, 5, 6, 7], 3, [4, 5], [0, 1, 2, 3], 5, [1, 2, 3, 4, 5, 6, 7]),
        ([4, 5], 3, [4, 5], [0, 1], 5, [1, 2, 3, 4, 5]),
        # A draft was wrong: what follows it goes with it.
        ([4, 5, 6, 7], 3, [4, 9], [0], 5, [1, 2, 3, 4, 9]),
        ([4, 5, 6, 7], 3, [9], [], 4, [1, 2, 3, 9]),
        ([4, 5, 6, 7], 3, [4, 9, 6], [0], 6, [1, 2, 3, 4, 9, 6]),  # agreeing again later does not count
        # The target ran past the drafts.
        ([4, 5], 3, [4, 5, 6], [0, 1], 6, [1, 2, 3, 4, 5, 6]),
        ([], 3, [4], [], 4, [1, 2, 3, 4]),
        # News that overlaps with what is known.
        ([4, 5], 2, [3, 4], [0, 1], 4, [1, 2, 3, 4, 5]),
        ([4, 5], 1, [2, 3, 9], [], 4, [1, 2, 3, 9]),
        # A repetition.
        ([4, 5], 3, [], [0, 1], 3, [1, 2, 3, 4, 5]),
        ([4, 5], 1, [2, 3], [0, 1], 3, [1, 2, 3, 4, 5]),
        # Older than what is known.
        ([4, 5], 1, [2], None, 3, [1, 2, 3, 4, 5]),
        ([4, 5], 0, [], None, 3, [1, 2, 3, 4, 5]),
    ],
)
def test_commit_keeps_what_came_true(
    drafts: list[int], base: int, news: list[int], kept: list[int] | None, num_committed: int, token_ids: list[int]
) -> None:
    sequence = new_sequence([1, 2, 3], drafts)
    assert sequence.commit(base, news) == kept
    assert (sequence.num_committed, sequence.token_ids) == (num_committed, token_ids)


class TestTrees:
    """Drafts 4 → (5 → (7, 4), 6 → 8), 9."""

    @pytest.fixture
    def sequence(self) -> DraftSequence:
        sequence = new_sequence([1, 2, 3], [])
        sequence.width = 2
        sequence.extend(-1, [4, 9], [0.0, 0.5])
        sequence.extend(0, [5, 6], [0.0, 1.5])
        sequence.extend(2, [7, 4], [0.0, 2.5])
        sequence.extend(3, [8], [0.0])
        return sequence

    def test_the_main_path_goes_from_likeliest_to_likeliest(self, sequence: DraftSequence) -> None:
        assert sequence.draft_token_ids == [4, 5, 7]
        assert (sequence.num_drafted, sequence.tip, sequence.is_chain) == (3, 4, False)
        assert sequence.proposal() == Drafts([4, 5, 7])
        assert list(sequence.tokens_to(6)) == [1, 2, 3, 4, 6, 8]

    @pytest.mark.parametrize(
        ("news", "kept", "drafts", "tip"),
        [
            ([4], [0, 2, 3, 4, 5, 6], Drafts([5, 6, 7, 4, 8], [-1, -1, 0, 0, 1]), 2),
            ([4, 6], [0, 3, 6], Drafts([8], [-1]), 0),
            ([4, 5], [0, 2, 4, 5], Drafts([7, 4], [-1, -1]), 0),
            ([9], [1], Drafts([], []), -1),
            ([4, 8], [0], Drafts([], []), -1),
            ([4, 6, 8], [0, 3, 6], Drafts([], []), -1),
            ([4, 6, 8, 1], [0, 3, 6], Drafts([], []), -1),
        ],
    )
    def test_commit_descends_and_keeps_the_subtree(
        self, news: list[int], kept: list[int], drafts: Drafts, tip: int, sequence: DraftSequence
    ) -> None:
        gaps = list(sequence.gaps)
        assert sequence.commit(3, news) == kept
        assert sequence.token_ids == [1, 2, 3, *news, *drafts.token_ids]
        assert (sequence.parents, sequence.tip) == (drafts.parents, tip)
        assert sequence.gaps == [gaps[node] for node in kept[len(kept) - len(drafts) :]]
        for node in range(-1, len(drafts)):
            assert [*sequence.children(node)] == [n for n, parent in enumerate(sequence.parents) if parent == node]
            assert sequence.depth(node) == len(sequence.path_tokens(node))

    @pytest.mark.parametrize(
        ("shape", "missing", "proposal"),
        [
            ((-1,), [], Drafts([4])),
            ((-1, -1), [], Drafts([4, 9], [-1, -1])),
            ((-1, 0, -1, 0), [], Drafts([4, 5, 9, 6], [-1, 0, -1, 0])),
            ((-1, -1, 1, 0, 0, 4), [1], Drafts([4, 9, 5, 6, 8], [-1, -1, 0, 0, 3])),
            ((-1, 0, 1, 2, 1, 4, 5), [4, 5], Drafts([4, 5, 7, 4], [-1, 0, 1, 1])),
            ((-1, -1, -1, 2), [], Drafts([4, 9], [-1, -1])),  # there is no third
        ],
    )
    def test_a_shape_is_filled_by_rank(
        self, shape: tuple[int, ...], missing: list[int], proposal: Drafts, sequence: DraftSequence
    ) -> None:
        sequence.shape = shape
        assert sequence.missing(100) == missing
        assert sequence.proposal() == proposal

    def test_nothing_is_missing_beyond_the_models_length(self, sequence: DraftSequence) -> None:
        sequence.shape = (-1, -1, 1, 0, 2, 3, 5, 6)
        assert sequence.missing(100) == [1, 4]
        assert sequence.missing(5) == [1]
        assert sequence.missing(4) == []


@pytest.mark.parametrize(("base", "is_behind"), [(0, False), (3, False), (4, True)])
def test_is_behind_when_tokens_before_the_base_are_unknown(base: int, is_behind: bool) -> None:
    """Drafts are no substitute for being told."""
    assert new_sequence([1, 2, 3], [4, 5]).is_behind(base) is is_behind


def grow(sequence: DraftSequence, choose: random.Random) -> None:
    """Extends some random nodes."""
    for _ in range(choose.randint(0, 4)):
        leaves = [node for node in range(-1, len(sequence.parents)) if not sequence.children(node)]
        tokens = choose.sample(range(3), choose.randint(1, 3))
        sequence.extend(choose.choice(leaves), tokens, [float(rank) for rank in range(len(tokens))])


def assert_tree_is_sound(sequence: DraftSequence) -> None:
    assert len(sequence.parents) == len(sequence.gaps) == len(sequence.token_ids) - sequence.num_committed
    main_path = []
    node = -1
    while sequence.children(node):
        node = sequence.children(node)[0]
        main_path.append(node)
    assert sequence.tip == node
    assert sequence.num_drafted == len(main_path)
    for node, parent in enumerate(sequence.parents):
        assert node in sequence.children(parent)
        assert sequence.depth(node) == sequence.depth(parent) + 1


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
            grow(sequence, choose)
            before, known = list(sequence.token_ids), sequence.num_committed
            kept = sequence.commit(base, news)
            assert sequence.token_ids[: sequence.num_committed] == truth[: sequence.num_committed]
            if kept is None:
                assert sequence.token_ids == before
            else:
                num_new = sequence.num_committed - known
                assert sequence.token_ids[known : known + len(kept)] == [before[known + node] for node in kept]
                assert len(sequence.parents) == max(0, len(kept) - num_new)
                assert_tree_is_sound(sequence)
        assert sequence.num_committed == committed
        told = choose.choice([told, sequence.num_committed])
