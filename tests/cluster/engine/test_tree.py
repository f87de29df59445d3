"""A tree verified in one step gives each of its nodes what the chain of its ancestors would give alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cluster.engine.batch import Segment
from cluster.engine.cpu_kernels import has_kernels
from cluster.engine.cpu_model import CpuModel
from cluster.engine.loader import load_model
from cluster.engine.model import TorchModel
from cluster.engine.runner import ModelRunner
from cluster.speculation.drafts import path_to

CPU = torch.device("cpu")
PREFIX = list(range(3, 40))
BLOCK_SIZE = 4


@pytest.fixture(params=[{}, {"family": "mistral", "sliding_window": 6}], ids=["llama", "window of 6"])
def folder(request: pytest.FixtureRequest, tiny_folder: Callable[..., Path]) -> Path:
    return tiny_folder(**request.param)


@pytest.fixture(params=["torch", pytest.param("kernels", marks=pytest.mark.skipif(not has_kernels(), reason="none"))])
def runner(request: pytest.FixtureRequest, folder: Path) -> ModelRunner:
    form = CpuModel if request.param == "kernels" else TorchModel
    return ModelRunner(load_model(folder, torch.float32, CPU, form=form), BLOCK_SIZE, 64)


def random_tree(seed: int, size: int) -> tuple[list[int], list[int]]:
    """Tokens and parents; the root is node 0. Siblings differ."""
    rng = random.Random(seed)
    parents = [-1, *(rng.randrange(node) for node in range(1, size))]
    return rng.sample(range(512), size), parents


def assert_same(actual: torch.Tensor, expected: torch.Tensor, runner: ModelRunner) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=3e-5)
    if runner.model.is_invariant:
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("prefix_len", [0, 5, 16, 37])
def test_every_node_equals_its_chain(runner: ModelRunner, seed: int, prefix_len: int) -> None:
    tokens, parents = random_tree(seed, 16)
    prefix, table, other = PREFIX[:prefix_len], list(range(20)), list(range(30, 50))
    if prefix:
        runner.run([Segment(prefix, 0, table, 0), Segment(prefix, 0, other, 0)])
    tree = Segment(tokens, prefix_len, table, 16, parents)
    chain_beside = Segment(tokens[:3], prefix_len, other, num_logits=1)
    logits = runner.run([chain_beside, tree])[1:]
    for node, path in enumerate(tree.paths()):
        chain = runner.run([Segment([tokens[i] for i in path], prefix_len, other, num_logits=1)])
        assert_same(logits[node : node + 1], chain, runner)


@pytest.mark.parametrize("path", [[0], [0, 1], [0, 3], [0, 1, 2, 6], [0, 4, 5]])
def test_the_rest_goes_on_as_if_the_path_had_been_a_chain(runner: ModelRunner, path: list[int]) -> None:
    """Nodes: 0 → (1 → 2 → 6, 3, 4 → 5)."""
    tokens, parents = [70, 71, 72, 73, 74, 75, 76], [-1, 0, 1, 0, 0, 4, 2]
    table, other = [9, 2, 7, 30, 4, 11, 5, 8, 1, 20, 21, 22, 23], list(range(40, 54))
    runner.run([Segment(PREFIX, 0, table, 0), Segment(PREFIX, 0, other, 0)])
    tree = Segment(tokens, len(PREFIX), table, 7, parents)
    runner.run([tree])
    runner.keep(table, len(PREFIX), path)
    runner.run([Segment([tokens[i] for i in path], len(PREFIX), other, 0)])
    end = len(PREFIX) + len(path)
    after_tree = runner.run([Segment([90, 91], end, table, 2)])
    after_chain = runner.run([Segment([90, 91], end, other, 2)])
    assert_same(after_tree, after_chain, runner)


def growing(parents: list[int], seed: int) -> list[list[int]]:
    """Returns a tree's nodes in random steps, in random order. A parent comes before its children or in their step."""
    rng = random.Random(seed)
    steps: list[list[int]] = []
    done: set[int] = {-1}
    while len(done) <= len(parents):
        step: list[int] = []
        for _ in range(rng.randint(1, 5)):
            ready = [node for node, parent in enumerate(parents) if node not in done and parent in done | set(step)]
            step += rng.sample([node for node in ready if node not in step], min(1, len(set(ready) - set(step))))
        steps.append(step)
        done |= set(step)
    return steps


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("prefix_len", [0, 5, 16, 37])
def test_a_tree_that_grows_from_step_to_step_equals_its_chains(runner: ModelRunner, seed: int, prefix_len: int) -> None:
    tokens, parents = random_tree(seed, 24)
    prefix, table, other = PREFIX[:prefix_len], list(range(20)), list(range(30, 50))
    if prefix:
        runner.run([Segment(prefix, 0, table, 0), Segment(prefix, 0, other, 0)])
    for nodes in growing(parents, seed):
        grown = Segment([tokens[node] for node in nodes], prefix_len, table, len(nodes), parents, nodes)
        chain_beside = Segment(tokens[:3], prefix_len, other, num_logits=1)
        logits = runner.run([grown, chain_beside])[:-1]
        for row, path in enumerate(grown.paths()):
            chain = runner.run([Segment([tokens[i] for i in path], prefix_len, other, num_logits=1)])
            assert_same(logits[row : row + 1], chain, runner)


@pytest.mark.parametrize("kept", [[0, 2, 4, 6], [0, 2, 5], [0, 1, 3], [0, 2, 4, 5, 6]])
def test_what_is_kept_of_a_tree_goes_on_as_a_tree(runner: ModelRunner, kept: list[int]) -> None:
    """Nodes: 0 → (1 → 3, 2 → (4 → 6, 5))."""
    tokens, parents = [70, 71, 72, 73, 74, 75, 76], [-1, 0, 0, 1, 2, 2, 4]
    table, other = [9, 2, 7, 30, 4, 11, 5, 8, 1, 20, 21, 22, 23], list(range(40, 54))
    runner.run([Segment(PREFIX, 0, table, 0), Segment(PREFIX, 0, other, 0)])
    runner.run([Segment(tokens, len(PREFIX), table, 0, parents)])
    runner.keep(table, len(PREFIX), kept)
    new_parents = [kept.index(parents[node]) if node else -1 for node in kept]
    for node in kept:
        grown = Segment([90], len(PREFIX), table, 1, [*new_parents, kept.index(node)], [len(kept)])
        path = [tokens[i] for i in path_to(node, parents)]
        chain = Segment([*path, 90], len(PREFIX), other, num_logits=1)
        assert_same(runner.run([grown]), runner.run([chain]), runner)
