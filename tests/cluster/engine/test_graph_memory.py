"""Sizes of recorded steps, and what they take."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.engine.graph_memory import StepModel, graph_bytes, graph_sizes
from cluster.engine.model_config import ModelConfig
from cluster.model_folder import resolve_model_folder

LARGE = StepModel(8192, 28672, 64, 8, 128, 128_256)


@pytest.mark.parametrize("max_rows", [1, 2, 3, 8, 9, 100, 256, 257, 512, 8192])
def test_the_last_size_holds_the_largest_step_or_is_the_largest(max_rows: int) -> None:
    sizes = graph_sizes(max_rows)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == 512 or sizes[-1] >= max_rows
    assert all(size < max_rows for size in sizes[:-1])
    assert len(sizes) <= 15


def test_what_is_counted() -> None:
    """Compares with figures computed by hand, for one row in 16 bits over contexts with one split."""
    model = StepModel(hidden_size=8, intermediate_size=16, num_heads=2, num_kv_heads=1, head_dim=4, vocab_size=100)
    inputs = 8 * (7 + 2)  # two blocks
    output = 4 * 100
    activations = 2 * (4 * 8 + (8 + 8) + 2 * 8 + 3 * 16)
    assert graph_bytes(model, [1], 32, 16, 2) == inputs + output + activations + 100 * 6


def test_splits_are_counted_where_there_are_any() -> None:
    short, long = (graph_bytes(LARGE, [8], context, 16, 2) for context in (512, 32_768))
    tables = 8 * 8 * (32_768 - 512) // 16
    assert long - short == tables + 8 * 64 * 64 * (128 + 2) * 4
    # A segment of 32 rows does not fill a GPU, but one of 256 rows does.
    short, long = (graph_bytes(LARGE, [32], context, 16, 2) for context in (512, 32_768))
    assert long - short == 32 * (8 * (32_768 - 512) // 16 + 64 * 64 * (128 + 2) * 4)
    short, long = (graph_bytes(LARGE, [256], context, 16, 2) for context in (512, 32_768))
    assert long - short == 8 * 256 * (32_768 - 512) // 16


def test_the_largest_parts_of_a_product_are_counted_with_invariant_numerics() -> None:
    model = StepModel(4096, 14_336, 32, 8, 128, 128_256)
    fast, invariant = (graph_bytes(model, [8], 512, 16, 2, has_parts=choice) for choice in (False, True))
    assert invariant - fast == 4 * 4 * 8 * 6144  # four parts of queries, keys and values


def test_more_sizes_share_what_the_largest_takes() -> None:
    assert graph_bytes(LARGE, [64, 256], 4096, 16, 2) == graph_bytes(LARGE, [256], 4096, 16, 2)


def test_of_a_model_that_is_there() -> None:
    config = ModelConfig.from_folder(Path(resolve_model_folder("outrider-target-12m")))
    model = StepModel.of(config)
    assert model.vocab_size == config.vocab_size
    assert 1e6 < graph_bytes(model, graph_sizes(512), config.max_position_embeddings, 16, 2) < 1e8
