from __future__ import annotations

import random

import numpy as np
import pytest

from cluster.speculation.drafts import Drafts, chain, depths_of
from cluster.speculation.tree import RoundTime, best_tree
from cluster.speculation.tree_policy import Template, TreePolicy

MAX_NODES = 16
TIME = RoundTime(lambda _: 0.0, lambda _: 1.0)


def new_policy(width: int) -> TreePolicy:
    return TreePolicy(width, MAX_NODES)


def verified(policy: TreePolicy, rates: list[float], num_rounds: int = 3000) -> None:
    """Rounds of a tree of three levels whose child of rank r is chosen with probability `rates[r]`."""
    choose = random.Random(0)
    width = len(rates)
    parents = [-1] * width + [node for node in range(width + width**2) for _ in range(width)]
    drafts = Drafts([node % width for node in range(len(parents))], parents)
    for _ in range(num_rounds):
        choices = choose.choices([*range(width), width], weights=[*rates, 1.0 - sum(rates)], k=4)
        end = choices.index(width) + 1 if width in choices else 4
        policy.count(drafts, choices[:end])


def test_measures_acceptance_by_depth_and_rank() -> None:
    policy = new_policy(3)
    verified(policy, [0.6, 0.2, 0.1])
    assert policy.acceptance()[:3] == pytest.approx(np.array([[0.6, 0.2, 0.1]] * 3), abs=0.08)


def test_a_chain_says_something_about_the_first_rank_only() -> None:
    policy = new_policy(2)
    verified(policy, [0.5, 0.4])
    before = policy.acceptance()
    second = before[0, 1] / (1 - before[0, 0])
    for _ in range(2000):
        policy.count(Drafts([7, 8]), [7, 9])
    after = policy.acceptance()
    assert after[0, 0] == pytest.approx(1.0, abs=0.01)
    assert after[1, 0] == pytest.approx(0.0, abs=0.01)
    assert after[0, 1] / (1 - after[0, 0]) == pytest.approx(second)


def test_with_width_1_there_are_only_chains() -> None:
    policy = new_policy(1)
    policy.count(Drafts([7]), [8])
    assert [policy.shape(k, lambda: TIME) for k in range(10)] == [None] * 10
    assert not policy.templates()


def test_one_draft_is_a_chain_whatever_was_measured() -> None:
    policy = new_policy(4)
    assert policy.shape(0, lambda: TIME) is policy.shape(1, lambda: TIME) is None


def test_a_good_draft_gets_a_chain_and_a_poor_one_a_tree() -> None:
    good, poor = new_policy(3), new_policy(3)
    verified(good, [0.97, 0.01, 0.005])
    verified(poor, [0.4, 0.25, 0.15])
    assert good.shape(6, lambda: TIME) is None
    shape = poor.shape(6, lambda: TIME)
    assert shape is not None
    assert len(shape) == 6
    assert shape.count(-1) == 3


def test_a_slow_draft_gets_a_flatter_tree() -> None:
    policy = new_policy(3)
    verified(policy, [0.7, 0.15, 0.08])
    levels = []
    for level in (0.001, 0.1):
        verified(policy, [0.7, 0.15, 0.08], num_rounds=200)  # shapes stay for some rounds
        shape = policy.shape(8, lambda level=level: RoundTime(lambda _: level, lambda _: 0.01))  # type: ignore[misc]
        levels.append(max(depths_of(shape or chain(8))))
    assert levels[1] < levels[0]


def test_the_answer_stays_for_some_rounds() -> None:
    policy = TreePolicy(2, MAX_NODES)
    first = policy.shape(8, lambda: TIME)
    verified(policy, [0.4, 0.4], num_rounds=20)
    assert policy.shape(8, lambda: TIME) == first
    verified(policy, [0.4, 0.4])
    assert policy.shape(8, lambda: TIME) != first


class TestTemplate:
    RATES = np.array([[0.5, 0.3, 0.1]])

    def test_the_average_sequence_survives_as_the_tree_says(self) -> None:
        template = Template.of(self.RATES, MAX_NODES, MAX_NODES)
        parents, survival = best_tree(self.RATES, MAX_NODES)
        assert template.parents == parents
        assert template.survivals(np.full((1, 4), 0.5))[0] == pytest.approx(survival)

    def test_a_sequence_has_first_children_of_its_own(self) -> None:
        template = Template.of(self.RATES, MAX_NODES, MAX_NODES)
        sure, average = template.survivals(np.array([[0.9] * 4, [0.5] * 4]))
        roots = [node for node, parent in enumerate(template.parents) if parent < 0]
        assert sure[roots[0]] == pytest.approx(0.9)
        assert sure[roots[1]] == pytest.approx(0.1 * 0.6)  # 0.3 of the half that is left over on the average
        assert average[roots[1]] == pytest.approx(0.3)

    def test_one_for_each_depth(self) -> None:
        policy = new_policy(3)
        verified(policy, [0.6, 0.2, 0.1])
        deepest = [max(template.levels) for template in policy.templates()]
        assert deepest == sorted(deepest)
        assert deepest[:3] == [1, 2, 3]
        assert policy.templates()[0].parents == (-1, -1, -1)
