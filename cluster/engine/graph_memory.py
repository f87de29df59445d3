"""What recorded steps of the GPU take of its memory, by formula: known before there is a KV cache. Imports no torch.

    inputs       8 bytes for every number of a row and for every block of its longest context
    output       the logits of a row in float32, once for all sizes
    pool         what a step holds while it computes: activations, logits, and the splits of attention; graphs share it,
                 so that the largest step counts

What the driver keeps for each recorded kernel comes on top and is not known here: it is left what `memory_utilization`
leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.engine.gpu_kernels.tiles import SPLIT, num_tiles, uses_splits
from cluster.engine.model_config import ModelConfig

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Rows of a step; larger steps are bound by arithmetic, not by launches."""

_NUM_INPUTS = 7  # of a row, beside its table: token, position, slot, logit row, row start, context, prefix


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """The rows of the steps that are recorded where no step has more than `max_rows`: the last holds these, or is the
    largest there is."""
    smaller = [size for size in _SIZES if size < max_rows]
    return (*smaller, *_SIZES[len(smaller) : len(smaller) + 1])


@dataclass(frozen=True, slots=True)
class StepModel:
    """As much of a model as the memory of its steps depends on."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @classmethod
    def of(cls, config: ModelConfig) -> StepModel:
        return cls(
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.vocab_size,
        )


def graph_bytes(model: StepModel, sizes: Sequence[int], max_context: int, block_size: int, value_bytes: int) -> int:
    """Of steps of `sizes` rows over contexts of up to `max_context` tokens, in a dtype of `value_bytes`."""
    largest = max(sizes)
    inputs = 8 * largest * (_NUM_INPUTS + -(-max_context // block_size))
    output = 4 * largest * model.vocab_size
    pool = max(_step_bytes(model, size, max_context, value_bytes) for size in sizes)
    return inputs + output + pool


def _step_bytes(model: StepModel, num_rows: int, max_context: int, value_bytes: int) -> int:
    queries, keys = model.num_heads * model.head_dim, 2 * model.num_kv_heads * model.head_dim
    # The residual and its norm, which is computed in float32; heads before and after their rotation; the two halves of
    # the gate and their product.
    in_dtype = 3 * model.hidden_size + 3 * (queries + keys) + queries + 4 * model.intermediate_size
    logits = model.vocab_size * (value_bytes + 4)
    of_a_row = value_bytes * in_dtype + 4 * 2 * model.hidden_size + logits
    return num_rows * (of_a_row + _splits_bytes(model, num_rows, max_context))


def _splits_bytes(model: StepModel, num_rows: int, max_context: int) -> int:
    """What the splits of a row's context leave, where a step of so many rows has any."""
    group, num_splits = model.num_heads // model.num_kv_heads, -(-max_context // SPLIT)
    if not uses_splits(num_tiles(num_rows, num_rows, group) * model.num_kv_heads, num_splits):
        return 0
    return 4 * model.num_heads * num_splits * (model.head_dim + 2)
