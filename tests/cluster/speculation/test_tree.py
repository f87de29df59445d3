"""The optimiser against all trees there are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from cluster.speculation.drafts import chain, depths_of
from cluster.speculation.tree import AcceptanceTable, RoundTime, Shape, best_shape, best_tree, expected_tokens

DESIGN = np.array([[0.78, 0.12, 0.05, 0.02]])  # about what the bundled pair's draft is worth


def all_trees(num_nodes: int) -> Iterator[Shape]:
    return itertools.product(*(range(-1, node) for node in range(num_nodes)))


def random_acceptance(seed: int, num_depths: int = 3, num_ranks: int = 3) -> AcceptanceTable:
    rates = np.random.default_rng(seed).dirichlet([1.0] * (num_ranks + 1), size=num_depths)
    return -np.sort(-rates[:, :num_ranks], axis=1)


def brute_force(acceptance: AcceptanceTable, num_nodes: int, max_depth: int) -> float:
    trees = (tree for tree in all_trees(num_nodes) if max(depths_of(tree), default=0) <= max_depth)
    return max(expected_tokens(tree, acceptance) for tree in trees)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("max_depth", [1, 2, 3, 6])
def test_no_tree_of_as_many_nodes_commits_more(seed: int, max_depth: int) -> None:
    acceptance = random_acceptance(seed)
    for num_nodes in range(7):
        shape, survival = best_tree(acceptance, num_nodes, max_depth)
        assert max(depths_of(shape), default=0) <= max_depth
        assert 1 + sum(survival) == pytest.approx(expected_tokens(shape, acceptance))
        assert 1 + sum(survival) == pytest.approx(brute_force(acceptance, num_nodes, max_depth))


def test_every_beginning_is_the_best_tree_of_its_size() -> None:
    whole, _ = best_tree(DESIGN, 32)
    for size in range(32):
        assert best_tree(DESIGN, size)[0] == whole[:size]


@pytest.mark.parametrize(
    ("acceptance", "shape"),
    [
        ([[1.0, 0.0]], (-1, 0, 1, 2)),
        ([[0.9, 0.05]], (-1, 0, 1, 2)),
        ([[0.5, 0.25]], (-1, 0, -1, 1)),  # of equals the deeper
        ([[0.5, 0.4, 0.1]], (-1, -1, 0, 0)),
        ([[0.4, 0.3, 0.3]], (-1, -1, -1, 0)),
        ([[0.5, 0.3], [0.0, 0.0]], (-1, -1)),  # nothing else is ever accepted
        ([[0.9, 0.1], [0.3, 0.3], [1.0, 0.0]], (-1, 0, 1, 2)),
    ],
)
def test_the_best_tree_of_four_nodes(acceptance: list[list[float]], shape: Shape) -> None:
    assert best_tree(np.array(acceptance), 4)[0] == shape


@pytest.mark.parametrize("seed", range(6))
def test_no_shape_commits_more_in_its_time_when_a_draft_step_costs_the_same_for_all_rows(seed: int) -> None:
    acceptance = random_acceptance(seed, num_depths=2)
    rng = np.random.default_rng(seed)
    level, verify_row = rng.uniform(0.0, 0.4, size=2)
    time = RoundTime(lambda _: level, lambda rows: 1.0 + verify_row * rows)

    def rate(shape: Shape) -> float:
        num_levels = max(depths_of(shape), default=0)
        return expected_tokens(shape, acceptance) / (num_levels * level + 1.0 + verify_row * (1 + len(shape)))

    best = max(rate(tree) for size in range(7) for tree in all_trees(size))
    assert rate(best_shape(acceptance, range(7), time)) == pytest.approx(best)


def test_is_a_chain_when_that_is_best() -> None:
    """Rows cost, steps of the draft do not, and the second rank is hardly ever right."""
    time = RoundTime(lambda _: 0.0, lambda rows: 1.0 + 0.1 * rows)
    shape = best_shape(np.array([[0.8, 0.05]]), range(9), time)
    assert list(shape) == chain(len(shape))
    assert len(shape) > 2


def test_is_flat_when_steps_of_the_draft_are_dear() -> None:
    time = RoundTime(lambda _: 2.0, lambda _: 1.0)
    shape = best_shape(np.array([[0.5, 0.3, 0.2]]), [3], time)
    assert shape == (-1, -1, -1)


def test_is_nothing_when_drafts_do_not_pay() -> None:
    assert best_shape(DESIGN, range(5), RoundTime(lambda _: 5.0, lambda _: 1.0)) == ()
