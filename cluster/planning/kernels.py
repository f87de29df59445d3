"""Bytes and operations of the kernels of a step on a GPU, by formula. Imports neither torch nor Triton.

    linears     reads the weights once a step; 2 * parameters * rows operations
    attention   reads a sequence's KV once for every tile of its rows (`cluster.engine.gpu_kernels.tiles`), of each KV
                head its own; 4 * query heads * head size operations for every position that a row sees, in every layer
    sampling    reads a row's logits, in float32, once for each pass; its operations are no products of matrices, and
                noise costs logarithms for a few candidates only: none are counted

The kernels run one after the other. The time of a kernel is that of its reads or that of its operations, whichever is
longer (`steps`). The formula assumes that every tile reads from memory. If the L2 cache holds data that several tiles
read, attention of many rows takes less time (`Kernel.bytes_once`).

The formula ignores small parts: activations, written KV, the splits of a context, the masked parts of tiles, and the
integers of the noise. If the number of heads is unknown (`PlannedModel.steps`), it counts one read of the KV, no
operations of attention, and no sampling.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cluster.engine.gpu_kernels.tiles import TILE, padded_group
from cluster.engine.graph_memory import StepModel
from cluster.engine.memory_plan import PlannedModel

_ROUNDING = 1e-9  # rounding error of divided and multiplied rows: it must not add a tile
_LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Segments:
    """Sequences of a step with equal numbers of rows and tokens. Numbers may be fractions, as means over steps."""

    num_seqs: float
    rows: float  # rows of each sequence
    cached_tokens: float  # cached tokens of each sequence
    sampled_rows: float | None = None  # sampled rows of each sequence; None: all

    @property
    def num_rows(self) -> float:
        return self.num_seqs * self.rows

    @property
    def num_sampled_rows(self) -> float:
        return self.num_seqs * (self.rows if self.sampled_rows is None else self.sampled_rows)

    @property
    def positions_seen(self) -> float:
        """Sum over rows of the positions that the row attends to: the cache, the rows before it, and itself."""
        return self.num_seqs * (self.rows * self.cached_tokens + self.rows * (self.rows + 1) / 2)

    @property
    def positions(self) -> float:
        """Sum of the lengths of all contexts, including the rows."""
        return self.num_seqs * (self.cached_tokens + self.rows)

    def positions_read(self, rows_per_tile: int) -> float:
        """Returns the sum over tiles of the positions that the tile reads: all positions up to its last row."""
        num_full = max(0, math.ceil(self.rows / rows_per_tile - _ROUNDING) - 1)  # full tiles before the last one
        of_full = num_full * self.cached_tokens + rows_per_tile * num_full * (num_full + 1) / 2
        return self.positions + self.num_seqs * of_full


Step = Sequence[Segments]
"The computation of one forward pass."


def num_rows(step: Step) -> float:
    return sum(segments.num_rows for segments in step)


def burst_step(num_seqs: float, cached_tokens: float, num_speculative_tokens: int) -> Step:
    """Returns the mean step of a draft's burst of k steps. Every step adds a token to each sequence.

    The time to read the KV is linear in the context, so k mean steps take as long as the burst.
    """
    return (Segments(num_seqs, 1, cached_tokens + max(0, num_speculative_tokens - 1) / 2),)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel, or all kernels of one kind, in a step."""

    name: str
    reads: str  # name of the data that makes up most of its bytes
    num_bytes: float  # bytes requested from memory
    num_operations: float  # operations on tensor cores
    bytes_once: float  # bytes without repeated reads
    is_sharded: bool = True  # divided over the GPUs of a group; otherwise one GPU has all


def step_kernels(model: PlannedModel, step: Step, logit_passes: int = 1) -> Iterator[Kernel]:
    """Yields the kernels in the order in which they run."""
    yield linears(model, num_rows(step))
    yield attention(model, step)
    yield sampling(model, sum(segments.num_sampled_rows for segments in step), logit_passes)


def linears(model: PlannedModel, rows: float) -> Kernel:
    return Kernel("linears", "weights", model.weight_bytes, 2 * model.num_parameters * rows, model.weight_bytes)


def attention(model: PlannedModel, step: Step) -> Kernel:
    """Returns the attention of all layers."""
    token_bytes = model.kv_bytes_per_token
    bytes_once = token_bytes * sum(segments.positions for segments in step)
    if model.steps is None:
        return Kernel("attention", "KV", bytes_once, 0.0, bytes_once)
    positions_read = sum(segments.positions_read(rows_per_tile(model.steps)) for segments in step)
    positions_seen = sum(segments.positions_seen for segments in step)
    operations = 4 * model.num_layers * model.steps.num_heads * model.steps.head_dim * positions_seen
    return Kernel("attention", "KV", token_bytes * positions_read, operations, bytes_once)


def rows_per_tile(shape: StepModel) -> int:
    """Returns how many rows of a sequence read its KV together."""
    return max(1, TILE // padded_group(shape.num_heads // shape.num_kv_heads))


def sampling(model: PlannedModel, rows: float, logit_passes: int = 1) -> Kernel:
    """Returns the sampling of `rows` rows. It runs on one GPU, which gathers the logits of all GPUs."""
    vocab_size = 0 if model.steps is None else model.steps.vocab_size
    row_bytes = _LOGIT_BYTES * vocab_size
    return Kernel("sampling", "logits", rows * row_bytes * logit_passes, 0.0, rows * row_bytes, is_sharded=False)
