"""Every part of a tree is a tree: each of its paths is a path of the whole."""

from __future__ import annotations

import random

import pytest

from cluster.speculation.drafts import Drafts, chain, depths_of, path_to

TREE = Drafts([1, 2, 3, 1, 2, 9], [-1, -1, 0, 0, 1, 3])  # 1 → (3, 1 → 9), 2 → 2


def paths(drafts: Drafts) -> set[tuple[int, ...]]:
    """The tokens on the way to each node."""
    parents = chain(len(drafts)) if drafts.parents is None else drafts.parents
    return {tuple(drafts.token_ids[i] for i in path_to(node, parents)) for node in range(len(drafts))}


def random_tree(seed: int, size: int = 12) -> Drafts:
    """Siblings differ."""
    choose = random.Random(seed)
    return Drafts(choose.sample(range(100), size), [choose.randrange(-1, node) for node in range(size)])


@pytest.mark.parametrize(
    ("committed", "left"),
    [
        ([], TREE),
        ([1], Drafts([3, 1, 9], [-1, -1, 1])),
        ([1, 1], Drafts([9])),
        ([2], Drafts([2])),
        ([1, 3], Drafts([])),
        ([3], None),
        ([1, 3, 9], None),
    ],
)
def test_what_is_left_after_committed_tokens(committed: list[int], left: Drafts | None) -> None:
    assert TREE.after(committed) == left


@pytest.mark.parametrize(
    ("committed", "left"), [([], [4, 5]), ([4], [5]), ([4, 5], []), ([5], None), ([4, 5, 6], None)]
)
def test_what_is_left_of_a_chain(committed: list[int], left: list[int] | None) -> None:
    assert Drafts([4, 5]).after(committed) == (None if left is None else Drafts(left))


@pytest.mark.parametrize("seed", range(10))
def test_parts_of_a_tree(seed: int) -> None:
    tree = random_tree(seed)
    assert paths(tree.first(5)) <= paths(tree)
    assert len(tree.first(5)) == 5
    assert paths(tree.within(2)) == {path for path in paths(tree) if len(path) <= 2}
    assert paths(tree.below(50)) == {path for path in paths(tree) if max(path) < 50}
    for path in paths(tree):
        left = tree.after(path)
        assert left is not None
        assert {path + rest for rest in paths(left)} == {p for p in paths(tree) if p[: len(path)] == path and p != path}


@pytest.mark.parametrize("drafts", [Drafts([4, 5, 6]), Drafts.tree([4, 5, 6], [-1, 0, 1])])
def test_a_chain_stays_one(drafts: Drafts) -> None:
    assert drafts.parents is None
    assert drafts.within(2) == drafts.first(2) == Drafts([4, 5])
    assert drafts.below(6) == Drafts([4, 5])
    assert drafts.below(7) == drafts.first(9) == drafts


@pytest.mark.parametrize(
    ("chosen", "outcome"),
    [([1, 3, 5], (2, 2)), ([1, 1, 9, 4], (2, 1)), ([2, 2, 7], (2, 0)), ([1, 5], (2, 1)), ([8], (2, 0))],
)
def test_the_outcome_of_the_main_path(chosen: list[int], outcome: tuple[int, int]) -> None:
    assert TREE.main_path_outcome(chosen) == outcome


def test_the_outcome_of_a_chain() -> None:
    assert Drafts([4, 5, 6]).main_path_outcome([4, 5, 9]) == (3, 2)
    assert Drafts().main_path_outcome([4]) == (0, 0)


def test_depths_count_from_one() -> None:
    assert depths_of(TREE.parents or []) == [1, 1, 2, 2, 2, 3]
