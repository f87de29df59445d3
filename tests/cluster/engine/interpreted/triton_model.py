"""The model with attention by the Triton kernel computes what the plain one does, in recorded steps and in others."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cluster.engine import triton_model
from cluster.engine.batch import Segment, pack
from cluster.engine.gpu_kernels import paged_attention
from cluster.engine.kv_cache import KVCache
from cluster.engine.model import Model, TorchModel
from cluster.engine.triton_model import TritonModel
from tests.cluster.engine.checkpoints import CHECKPOINTS
from tests.cluster.engine.filled_caches import BLOCK_SIZE, CPU, NUM_BLOCKS, model_and_cache
from tests.interpreter import spare_bookkeeping
from tests.soak import length


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    spare_bookkeeping(monkeypatch)


FAMILIES = [{}, {"family": "qwen3"}, {"family": "mistral", "sliding_window": 6}, CHECKPOINTS["gemma3"]]


@pytest.fixture(params=length(FAMILIES[2:], FAMILIES), ids=str)
def folder(request: pytest.FixtureRequest, tiny_folder: Callable[..., Path]) -> Path:
    return tiny_folder(**request.param)


def random_segments(rng: random.Random, *, trees: bool, most: int = 5) -> list[Segment]:
    tables = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    segments = []
    for _ in range(rng.randint(1, most)):
        num_rows, start = rng.randint(1, 7), rng.randint(0, 25)
        table = [tables.pop() for _ in range(-(-(start + num_rows) // BLOCK_SIZE))]
        parents = [-1, *(rng.randrange(node) for node in range(1, num_rows))] if trees and rng.random() < 0.6 else None
        segments.append(
            Segment([rng.randrange(200) for _ in range(num_rows)], start, table, rng.randint(1, num_rows), parents)
        )
    return segments


def assert_same(plain: tuple[Model, KVCache], other: tuple[Model, KVCache], segments: list[Segment]) -> None:
    """Logits, and what every block holds that a sequence can have."""
    batch = pack(segments, BLOCK_SIZE, CPU)
    torch.testing.assert_close(other[0].forward(batch), plain[0].forward(batch), rtol=0, atol=1e-4)
    spare = NUM_BLOCKS * BLOCK_SIZE
    torch.testing.assert_close(other[1].keys[:, :spare], plain[1].keys[:, :spare], rtol=0, atol=1e-4)
    torch.testing.assert_close(other[1].values[:, :spare], plain[1].values[:, :spare], rtol=0, atol=1e-4)


def test_the_same_logits_and_cache(folder: Path) -> None:
    rng = random.Random(1)
    plain, other = model_and_cache(folder, TorchModel), model_and_cache(folder, TritonModel)
    for trees in length((False, True), (False, True, True)):
        assert_same(plain, other, random_segments(rng, trees=trees))


def test_warming_up_changes_no_block_of_a_sequence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (triton_model, paged_attention):
        monkeypatch.setattr(module, "SPLIT", 64)
    model, cache = model_and_cache(folder, TritonModel)
    before = cache.keys[:, : NUM_BLOCKS * BLOCK_SIZE].clone()
    assert isinstance(model, TritonModel)
    model.warm_up()
    assert torch.equal(cache.keys[:, : NUM_BLOCKS * BLOCK_SIZE], before)


def test_steps_that_are_recorded(folder: Path) -> None:
    """One after the other through the same inputs and the same output, and past the largest of them."""
    rng = random.Random(2)
    plain, other = model_and_cache(folder, TorchModel), model_and_cache(folder, TritonModel)
    replayed: list[int] = []

    def record(call: Callable[[], None]) -> Callable[[], None]:
        """As on a GPU: the call is made once, on what is not a step, and then again and again."""
        call()
        return lambda: (replayed.append(1), call())[0]

    assert isinstance(other[0], TritonModel)
    other[0].record(16, 48, record)
    number = length(2, 4)
    for _ in range(number):
        assert_same(plain, other, random_segments(rng, trees=False, most=2))
    assert len(replayed) == number
    assert_same(plain, other, [Segment([5] * 17, 0, list(range(5)), 2)])  # more rows than any has
    assert_same(plain, other, [Segment([5], 48, list(range(20, 33)), 1)])  # a longer context
    assert_same(plain, other, [Segment([5, 6, 7], 3, [40, 41], 3, [-1, 0, 0])])
    assert len(replayed) == number
