"""Steps in fixed shapes give what steps in their own shapes give, padded or not."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cluster.engine.batch import Segment, pack
from cluster.engine.cuda_graphs import StepShape
from cluster.engine.fixed_shape_ops import FixedShapeOps
from cluster.engine.kv_cache import KVCache
from cluster.engine.loader import load_model
from cluster.engine.model import Decoder
from cluster.engine.model_config import ModelConfig
from cluster.engine.ops import TorchOps

CPU = torch.device("cpu")
BLOCK_SIZE = 4
NUM_BLOCKS = 64


@pytest.fixture(params=[{}, {"family": "mistral", "sliding_window": 6}, {"family": "qwen3"}], ids=lambda p: str(p))
def folder(request: pytest.FixtureRequest, tiny_folder: Callable[..., Path]) -> Path:
    return tiny_folder(**request.param)


def models(folder: Path) -> tuple[Decoder, Decoder]:
    """In their own shapes, in fixed ones."""
    config = ModelConfig.from_folder(folder)
    both = TorchOps(config, torch.float32, CPU), FixedShapeOps(config, torch.float32, CPU)
    plain, fixed = (load_model(folder, torch.float32, CPU, ops=ops) for ops in both)
    return plain, fixed


def cache_of(model: Decoder) -> KVCache:
    cache = KVCache(model.config, NUM_BLOCKS, BLOCK_SIZE, torch.float32, CPU)
    generator = torch.Generator().manual_seed(1)
    for tensor in (cache.keys, cache.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return cache


def random_segments(seed: int, *, trees: bool) -> list[Segment]:
    rng = random.Random(seed)
    tables = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    segments = []
    for _ in range(rng.randint(1, 5)):
        num_rows, start = rng.randint(1, 9), rng.randint(0, 25)
        table = [tables.pop() for _ in range(-(-(start + num_rows) // BLOCK_SIZE))]
        parents = None
        if trees and rng.random() < 0.6:
            parents = [-1, *(rng.randrange(node) for node in range(1, num_rows))]
        token_ids = [rng.randrange(200) for _ in range(num_rows)]
        segments.append(Segment(token_ids, start, table, rng.randint(1, num_rows), parents))
    return segments


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_the_same_logits_and_cache(folder: Path, seed: int, trees: bool) -> None:
    plain, fixed = models(folder)
    batch = pack(random_segments(seed, trees=trees), BLOCK_SIZE, CPU)
    caches = cache_of(plain), cache_of(fixed)
    logits = plain.forward(batch, caches[0]), fixed.forward(batch, caches[1])
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-4)
    torch.testing.assert_close(caches[1].keys, caches[0].keys, rtol=0, atol=1e-4)


@pytest.mark.parametrize("seed", range(8))
def test_padding_changes_nothing(folder: Path, seed: int) -> None:
    """Neither the logits that are read nor a block that a sequence has."""
    plain, fixed = models(folder)
    batch = pack(random_segments(seed, trees=False), BLOCK_SIZE, CPU)
    caches = cache_of(plain), cache_of(fixed)
    expected = plain.forward(batch, caches[0])
    padded = StepShape.of(batch).pad(batch, caches[1].spare_block, BLOCK_SIZE)
    logits = fixed.forward(padded, caches[1])
    torch.testing.assert_close(logits[: len(expected)], expected, rtol=0, atol=1e-4)
    own = NUM_BLOCKS * BLOCK_SIZE
    torch.testing.assert_close(caches[1].keys[:, :own], caches[0].keys[:, :own], rtol=0, atol=1e-4)
    assert torch.isfinite(logits).all()


def test_rows_that_pad_touch_no_others(folder: Path) -> None:
    """Where there are more of them than the last segment has places left."""
    plain, fixed = models(folder)
    segments = [Segment([index + 1], 3, [index], 1) for index in range(31)] + [Segment([9, 8], 2, [40], 2)]
    batch = pack(segments, BLOCK_SIZE, CPU)
    expected = plain.forward(batch, cache_of(plain))
    cache = cache_of(fixed)
    padded = StepShape.of(batch).pad(batch, cache.spare_block, BLOCK_SIZE)
    assert len(padded.token_ids) >= len(batch.token_ids) + 8
    assert len(padded.context_lens) == len(batch.context_lens)
    torch.testing.assert_close(fixed.forward(padded, cache)[: len(expected)], expected, rtol=0, atol=1e-4)


def test_a_prompts_chunk_is_computed_in_its_own_shape(folder: Path) -> None:
    plain, fixed = models(folder)
    batch = pack([Segment([5] * 100, 0, list(range(25)), 1), Segment([7], 3, [30], 1)], BLOCK_SIZE, CPU)
    expected = plain.forward(batch, cache_of(plain))
    torch.testing.assert_close(fixed.forward(batch, cache_of(fixed)), expected, rtol=0, atol=1e-4)


def test_shapes_are_few_and_large_enough(folder: Path) -> None:
    shapes = set()
    for num_rows in range(1, 65):
        batch = pack([Segment([1] * num_rows, 0, list(range(16)), 1)], BLOCK_SIZE, CPU)
        shape = StepShape.of(batch)
        assert num_rows <= shape.num_rows < max(5, 2 * num_rows)
        shapes.add(shape)
    assert len(shapes) < 25
