"""A tree verified in one step gives each of its nodes what the chain of its ancestors would give alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cluster.engine.batch import Segment
from cluster.engine.cpu_ops import CpuOps, has_kernels
from cluster.engine.loader import load_model
from cluster.engine.model_config import ModelConfig
from cluster.engine.ops import TorchOps
from cluster.engine.runner import ModelRunner

CPU = torch.device("cpu")
PREFIX = list(range(3, 40))
BLOCK_SIZE = 4


@pytest.fixture(params=[{}, {"family": "mistral", "sliding_window": 6}], ids=["llama", "window of 6"])
def folder(request: pytest.FixtureRequest, tiny_folder: Callable[..., Path]) -> Path:
    return tiny_folder(**request.param)


@pytest.fixture(params=["torch", pytest.param("kernels", marks=pytest.mark.skipif(not has_kernels(), reason="none"))])
def runner(request: pytest.FixtureRequest, folder: Path) -> ModelRunner:
    config = ModelConfig.from_folder(folder)
    ops = CpuOps(config, torch.float32) if request.param == "kernels" else TorchOps(config, torch.float32, CPU)
    return ModelRunner(load_model(folder, torch.float32, CPU, ops=ops), BLOCK_SIZE, 64)


def random_tree(seed: int, size: int) -> tuple[list[int], list[int]]:
    """Tokens and parents; the root is node 0. Siblings differ."""
    rng = random.Random(seed)
    parents = [-1, *(rng.randrange(node) for node in range(1, size))]
    return rng.sample(range(512), size), parents


def assert_same(actual: torch.Tensor, expected: torch.Tensor, runner: ModelRunner) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
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
    runner.keep_path(tree, path)
    runner.run([Segment([tokens[i] for i in path], len(PREFIX), other, 0)])
    end = len(PREFIX) + len(path)
    after_tree = runner.run([Segment([90, 91], end, table, 2)])
    after_chain = runner.run([Segment([90, 91], end, other, 2)])
    assert_same(after_tree, after_chain, runner)
