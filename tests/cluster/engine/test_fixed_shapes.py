"""Steps in fixed shapes give what steps in their own shapes give, padded or not."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cluster.engine.batch import Segment, pack
from cluster.engine.cuda_graphs import StepShape
from cluster.engine.fixed_shape_model import FixedShapeModel
from cluster.engine.kv_cache import KVCache
from cluster.engine.model import Model, TorchModel

from .filled_caches import BLOCK_SIZE, CPU, NUM_BLOCKS, model_and_cache


@pytest.fixture(params=[{}, {"family": "mistral", "sliding_window": 6}, {"family": "qwen3"}], ids=lambda p: str(p))
def folder(request: pytest.FixtureRequest, tiny_folder: Callable[..., Path]) -> Path:
    return tiny_folder(**request.param)


def both(folder: Path) -> tuple[tuple[Model, KVCache], tuple[Model, KVCache]]:
    """In their own shapes, in fixed ones."""
    return model_and_cache(folder, TorchModel), model_and_cache(folder, FixedShapeModel)


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
    (plain, plain_cache), (fixed, fixed_cache) = both(folder)
    batch = pack(random_segments(seed, trees=trees), BLOCK_SIZE, CPU)
    torch.testing.assert_close(fixed.forward(batch), plain.forward(batch), rtol=0, atol=1e-4)
    torch.testing.assert_close(fixed_cache.keys, plain_cache.keys, rtol=0, atol=1e-4)


@pytest.mark.parametrize("seed", range(8))
def test_padding_changes_nothing(folder: Path, seed: int) -> None:
    """Neither the logits that are read nor a block that a sequence has."""
    (plain, plain_cache), (fixed, fixed_cache) = both(folder)
    batch = pack(random_segments(seed, trees=False), BLOCK_SIZE, CPU)
    expected = plain.forward(batch)
    logits = fixed.forward(StepShape.of(batch).pad(batch, fixed_cache.spare_block, BLOCK_SIZE))
    torch.testing.assert_close(logits[: len(expected)], expected, rtol=0, atol=1e-4)
    spare = NUM_BLOCKS * BLOCK_SIZE  # the first slot that no sequence has
    torch.testing.assert_close(fixed_cache.keys[:, :spare], plain_cache.keys[:, :spare], rtol=0, atol=1e-4)
    assert torch.isfinite(logits).all()


def test_rows_that_pad_touch_no_others(folder: Path) -> None:
    """Where there are more of them than the last segment has places left."""
    (plain, _), (fixed, cache) = both(folder)
    segments = [Segment([index + 1], 3, [index], 1) for index in range(31)] + [Segment([9, 8], 2, [40], 2)]
    batch = pack(segments, BLOCK_SIZE, CPU)
    expected = plain.forward(batch)
    padded = StepShape.of(batch).pad(batch, cache.spare_block, BLOCK_SIZE)
    assert len(padded.token_ids) >= len(batch.token_ids) + 8
    assert len(padded.context_lens) == len(batch.context_lens)
    torch.testing.assert_close(fixed.forward(padded)[: len(expected)], expected, rtol=0, atol=1e-4)


def test_a_prompts_chunk_is_computed_in_its_own_shape(folder: Path) -> None:
    (plain, _), (fixed, _) = both(folder)
    batch = pack([Segment([5] * 100, 0, list(range(25)), 1), Segment([7], 3, [30], 1)], BLOCK_SIZE, CPU)
    torch.testing.assert_close(fixed.forward(batch), plain.forward(batch), rtol=0, atol=1e-4)


def test_shapes_are_few_and_large_enough(folder: Path) -> None:
    shapes = set()
    for num_rows in range(1, 65):
        batch = pack([Segment([1] * num_rows, 0, list(range(16)), 1)], BLOCK_SIZE, CPU)
        shape = StepShape.of(batch)
        assert num_rows <= shape.num_rows < max(5, 2 * num_rows)
        shapes.add(shape)
    assert len(shapes) < 25
