"""Formula for the GPU memory of recorded steps, to size the KV cache before they are recorded. Imports no torch.

    inputs       8 bytes for every number of a row and for every block of its longest context.
    output       The logits of a row in float32, once for all sizes.
    pool         Memory of a step while it computes: activations, logits, the splits of attention, and the
                 parts of products in a fixed order. Graphs share it, so only the largest step counts.

The driver needs more memory for each recorded kernel. Its size is unknown here, so this memory must fit into the share
that `memory_utilization` leaves free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.engine.gpu_kernels.product_tiles import part_sums_bytes
from cluster.engine.gpu_kernels.tiles import SPLIT, uses_splits
from cluster.engine.model_config import ModelConfig

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"Rows of a step; larger steps are bound by arithmetic, not by launches."

_NUM_INPUTS = 7  # inputs per row, without its table: token, position, slot, logit row, row start, context, prefix


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """Returns the row counts of the recorded steps if no step has more than `max_rows` rows.

    The last one is at least `max_rows`, or the largest available size.
    """
    smaller = [size for size in _SIZES if size < max_rows]
    return (*smaller, *_SIZES[len(smaller) : len(smaller) + 1])


@dataclass(frozen=True, slots=True)
class StepModel:
    """Sizes of a model that determine the memory of its steps."""

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


def graph_bytes(
    model: StepModel,
    sizes: Sequence[int],
    max_context: int,
    block_size: int,
    value_bytes: int,
    *,
    has_parts: bool = False,
) -> int:
    """Returns the bytes of recorded steps of `sizes` rows over contexts of up to `max_context` tokens.

    `value_bytes` is the size of a value in the model's dtype. `has_parts`: whether products sum parts in a fixed order,
    as with invariant numerics or quantized weights.
    """
    largest = max(sizes)
    inputs = 8 * largest * (_NUM_INPUTS + -(-max_context // block_size))
    output = 4 * largest * model.vocab_size
    pool = max(_step_bytes(model, size, max_context, value_bytes) for size in sizes)
    parts = max(_parts_bytes(model, size, value_bytes) for size in sizes) if has_parts else 0
    return inputs + output + pool + parts


def _parts_bytes(model: StepModel, num_rows: int, value_bytes: int) -> int:
    """Returns the bytes of the partial sums of a product; the maximum over all products of the model."""
    hidden, queries, keys = model.hidden_size, model.num_heads * model.head_dim, 2 * model.num_kv_heads * model.head_dim
    shapes = (
        (queries + keys, hidden),
        (hidden, queries),
        (2 * model.intermediate_size, hidden),
        (hidden, model.intermediate_size),
        (model.vocab_size, hidden),
    )
    return max(part_sums_bytes(num_rows, *shape, value_bytes) for shape in shapes)


def _step_bytes(model: StepModel, num_rows: int, max_context: int, value_bytes: int) -> int:
    queries, keys = model.num_heads * model.head_dim, 2 * model.num_kv_heads * model.head_dim
    # The residual, the sum and the norm; heads before and after the rotation, and the attention's output; the two
    # halves of the gate and their product.
    in_dtype = 4 * model.hidden_size + (queries + keys) + 2 * queries + 3 * model.intermediate_size
    logits = model.vocab_size * (value_bytes + 4)
    return num_rows * (value_bytes * in_dtype + logits + _splits_bytes(model, num_rows, max_context))


def _splits_bytes(model: StepModel, num_rows: int, max_context: int) -> int:
    """Returns the bytes of the partial results of a row's attention splits; 0 if a step of `num_rows` rows has none."""
    group, num_splits = model.num_heads // model.num_kv_heads, -(-max_context // SPLIT)
    if not uses_splits(num_rows, model.num_kv_heads, group, num_splits):
        return 0
    return 4 * model.num_heads * num_splits * (model.head_dim + 2)
