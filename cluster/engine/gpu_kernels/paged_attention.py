"""Attention over the paged KV cache in Triton: prefill chunks, decodes, verify chains and trees in one kernel.

The kernel reads keys and values in place, through the block table, and copies no context. It reads a KV head once for
the queries of up to `TILE // G` rows of a segment. G is the number of query heads of the KV head, rounded up to a power
of 2.

A row's bits do not depend on other rows. The context is cut into splits of `SPLIT` positions, counted from its start.
Each split is processed from its start in steps of `keys_per_step` positions (online softmax: Milakov, Gimelshein, arXiv
1805.02867; Dao et al., arXiv 2205.14135). The splits are merged in order. Positions that only other rows of a tile see
add exact zeros.

Usually one program processes and merges all splits of a tile. If a step has too few tiles to fill a GPU, several
programs share the splits of a tile (Dao et al., "Flash-Decoding", 2023), and a second kernel merges them. Both ways use
the same operations in the same order, so neither kernel may fuse a product with a sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from cluster.engine.batch import Batch
from cluster.engine.gpu_kernels.tiles import PARTS, SPLIT, TILE, num_tiles, padded_group, uses_splits

_LARGEST_SPAN = 2**31 - 1
_WIDE = 128  # values of a head; more need smaller steps, for the registers and for an A10G's shared memory of 99 KB
_PATH_STEP = 8  # paths are padded to multiples of this length, because Triton compiles the kernel for each length
MERGE_OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tile sizes for a dtype. They are the same in every step, because they determine the order of sums.

    With these sizes no register is spilled; their speed was not measured.
    """

    keys_per_step: int  # positions whose keys are multiplied at once
    num_warps: int
    tile: int = TILE

    @classmethod
    def of(cls, dtype: torch.dtype, head_dim: int) -> Sizes:
        if head_dim > _WIDE:
            return cls(16, 8) if dtype == torch.float32 else cls(32, 8)
        return cls(32, 8) if dtype == torch.float32 else cls(64, 4)

    @property
    def options(self) -> dict[str, Any]:
        return {"num_warps": self.num_warps, "num_stages": 2, "enable_fp_fusion": False}


@triton.jit  # type: ignore[untyped-decorator]
def _segment_of(row_starts, place, num_segments, rows_per_tile: tl.constexpr, spare_tiles: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the segment of tile `place`.

    The first tile of segment s is row_starts[s] // rows_per_tile + s * spare_tiles. One spare tile per segment makes up
    for the remainder of its division. If places are rows (`rows_per_tile` 1), no spare tiles are needed.
    """
    low = 0
    high = num_segments
    while high - low > 1:
        middle = (low + high) // 2
        begins_before = tl.load(row_starts + middle) // rows_per_tile + middle * spare_tiles <= place
        low = tl.where(begins_before, middle, low)
        high = tl.where(begins_before, high, middle)
    return low


@triton.jit
def _merge(maximum, total, summed, split_maximum, split_total, split_summed):  # type: ignore[no-untyped-def]
    """Merges the next split into the splits before it: maxima (in powers of 2), sums of weights, weighted values."""
    merged = tl.maximum(maximum, split_maximum)
    base = tl.where(merged == float("-inf"), 0.0, merged)
    before, after = tl.exp2(maximum - base), tl.exp2(split_maximum - base)
    total = total * before + split_total * after
    summed = summed * before[:, None] + split_summed * after[:, None]
    return merged, total, summed


@triton.jit  # type: ignore[untyped-decorator]
def _walk(  # type: ignore[no-untyped-def]
    query, position, is_row, is_tree, prefix_len, limit, first_seen, split, scale, span,
    block_table, paths, keys, values, slot_stride, dims,
    head_dim: tl.constexpr, path_len: tl.constexpr, block_size: tl.constexpr,
    split_len: tl.constexpr, keys_per_step: tl.constexpr,
):  # fmt: skip
    """Computes one split of a tile's context: maximum and sum of weights [tile], weighted values [tile, dims]."""
    maximum = tl.full([query.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([query.shape[0]], tl.float32)
    summed = tl.zeros([query.shape[0], query.shape[1]], tl.float32)
    steps_skipped = tl.maximum(first_seen - split * split_len, 0) // keys_per_step
    start = split * split_len + steps_skipped * keys_per_step
    for first in range(start, tl.minimum((split + 1) * split_len, limit), keys_per_step):
        place = first + tl.arange(0, keys_per_step)
        is_there = place < limit
        block = tl.load(block_table + place // block_size, mask=is_there, other=0)
        offset = (block * block_size + place % block_size) * slot_stride
        is_read = is_there[:, None] & (dims < head_dim)[None, :]
        # Unused memory may hold any value, and 0 times infinity or NaN is not 0.
        key = tl.load(keys + offset[:, None] + dims[None, :], mask=is_read, other=0.0)
        value = tl.load(values + offset[:, None] + dims[None, :], mask=is_read, other=0.0)

        in_window = place[None, :] > position[:, None] - span
        seen = in_window & (place[None, :] <= position[:, None])
        if path_len > 0:  # noqa: SIM102
            if is_tree:
                seen = in_window & (place[None, :] < prefix_len)
                if first + keys_per_step > prefix_len:
                    for depth in range(path_len):
                        node = tl.load(paths + depth, mask=is_row, other=-1).to(tl.int32)
                        node = tl.where(prefix_len + depth > position - span, node, -1)
                        seen = seen | ((place[None, :] == prefix_len + node[:, None]) & (node >= 0)[:, None])
        seen = seen & is_there[None, :] & is_row[:, None]

        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(maximum, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(score - base[:, None])
        shrunk = tl.exp2(maximum - base)
        total = total * shrunk + tl.sum(weight, 1)
        product = tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        summed = summed * shrunk[:, None] + product
        maximum = higher
    return maximum, total, summed


# These sizes change from step to step. If specialized, Triton would compile again for sizes of 1 and multiples of 16.
@triton.jit(do_not_specialize=["num_segments", "num_splits", "parts", "table_stride", "span"])  # type: ignore[untyped-decorator]
def attention_kernel(  # type: ignore[no-untyped-def]
    output, part_sums, part_totals, part_maxima, query, keys, values,
    block_tables, row_starts, context_lens, prefix_lens, positions, paths,
    num_segments, num_heads, num_splits, parts, scale, span,
    query_stride, output_stride, slot_stride, table_stride,
    group: tl.constexpr, padded_group: tl.constexpr, tile: tl.constexpr,
    head_dim: tl.constexpr, padded_dim: tl.constexpr, path_len: tl.constexpr, block_size: tl.constexpr,
    split_len: tl.constexpr, keys_per_step: tl.constexpr, is_split: tl.constexpr,
):  # fmt: skip
    """Program (tile, KV head, part): writes the sums of its splits if `is_split`, otherwise the output."""
    rows_per_tile: tl.constexpr = tile // padded_group
    place = tl.program_id(0)
    kv_head = tl.program_id(1)
    segment = _segment_of(row_starts, place, num_segments, rows_per_tile, 1)
    row_start = tl.load(row_starts + segment)
    row_end = tl.load(row_starts + segment + 1)
    first_row = row_start + (place - (row_start // rows_per_tile + segment)) * rows_per_tile
    if first_row >= row_end:
        return

    entry = tl.arange(0, tile)
    row = first_row + entry // padded_group
    head = kv_head * group + entry % padded_group
    is_row = (row < row_end) & (entry % padded_group < group)
    dims = tl.arange(0, padded_dim)
    is_value = is_row[:, None] & (dims < head_dim)[None, :]
    queries = tl.load(
        query + row[:, None] * query_stride + head[:, None] * head_dim + dims[None, :], mask=is_value, other=0.0
    )
    position = tl.load(positions + row, mask=is_row, other=-1).to(tl.int32)
    prefix_len = tl.load(prefix_lens + segment).to(tl.int32)
    limit = tl.max(position, 0) + 1
    is_tree = False
    row_paths = paths + row * path_len
    if path_len > 0:
        is_tree = tl.load(paths + first_row * path_len) >= 0
        limit = tl.where(is_tree, tl.load(context_lens + segment).to(tl.int32), limit)
    earliest = tl.min(tl.where(is_row, position, limit), 0)
    first_seen = tl.maximum(earliest - span + 1, 0)

    block_table = block_tables + segment * table_stride
    keys += kv_head * head_dim
    values += kv_head * head_dim
    last_split = (limit - 1) // split_len
    if not is_split:
        maximum = tl.full([tile], float("-inf"), tl.float32)
        total = tl.zeros([tile], tl.float32)
        summed = tl.zeros([tile, padded_dim], tl.float32)
        for split in range(first_seen // split_len, last_split + 1):
            split_maximum, split_total, split_summed = _walk(
                queries, position, is_row, is_tree, prefix_len, limit, first_seen, split, scale, span,
                block_table, row_paths, keys, values, slot_stride, dims,
                head_dim, path_len, block_size, split_len, keys_per_step,
            )  # fmt: skip
            maximum, total, summed = _merge(maximum, total, summed, split_maximum, split_total, split_summed)
        attended = tl.div_rn(summed, tl.broadcast_to(tl.where(is_row, total, 1.0)[:, None], summed.shape))
        tl.store(
            output + row[:, None] * output_stride + head[:, None] * head_dim + dims[None, :], attended, mask=is_value
        )
    else:
        first_split = first_seen // split_len
        # Part p has the splits p, p + parts, ...
        own = first_split + (tl.program_id(2) + parts - first_split % parts) % parts
        for split in range(own, last_split + 1, parts):
            split_maximum, split_total, split_summed = _walk(
                queries, position, is_row, is_tree, prefix_len, limit, first_seen, split, scale, span,
                block_table, row_paths, keys, values, slot_stride, dims,
                head_dim, path_len, block_size, split_len, keys_per_step,
            )  # fmt: skip
            index = (row * num_heads + head) * num_splits + split
            tl.store(part_maxima + index, split_maximum, mask=is_row)
            tl.store(part_totals + index, split_total, mask=is_row)
            tl.store(part_sums + index[:, None] * head_dim + dims[None, :], split_summed, mask=is_value)


@triton.jit(do_not_specialize=["num_segments", "num_splits", "span"])  # type: ignore[untyped-decorator]
def merge_kernel(  # type: ignore[no-untyped-def]
    output, part_sums, part_totals, part_maxima, row_starts, context_lens, positions, paths,
    num_segments, num_heads, num_splits, span, output_stride,
    head_dim: tl.constexpr, padded_dim: tl.constexpr, path_len: tl.constexpr, split_len: tl.constexpr,
):  # fmt: skip
    """Program (row, head): merges the sums of the splits that the row sees, in their order."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if row >= tl.load(row_starts + num_segments):
        return
    position = tl.load(positions + row)
    limit = position + 1
    # Two conditions, because the first must be decided at compile time: without paths there is nothing to load.
    if path_len > 0:  # noqa: SIM102
        if tl.load(paths + row * path_len) >= 0:
            segment = _segment_of(row_starts, row, num_segments, 1, 0)
            limit = tl.load(context_lens + segment)
    dims = tl.arange(0, padded_dim)
    maximum = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    summed = tl.zeros([1, padded_dim], tl.float32)
    one = tl.arange(0, 1)
    for split in range(tl.maximum(position - span + 1, 0) // split_len, (limit - 1) // split_len + 1):
        index = (row * num_heads + head) * num_splits + split + one
        split_summed = tl.load(
            part_sums + index[:, None] * head_dim + dims[None, :], mask=(dims < head_dim)[None, :], other=0.0
        )
        split_maximum, split_total = tl.load(part_maxima + index), tl.load(part_totals + index)
        maximum, total, summed = _merge(maximum, total, summed, split_maximum, split_total, split_summed)
    attended = tl.div_rn(summed, tl.broadcast_to(total[:, None], summed.shape))
    place = row * output_stride + head * head_dim + dims[None, :]
    tl.store(output + place + one[:, None], attended, mask=(dims < head_dim)[None, :])


def constants(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, block_size: int, path_len: int, is_split: bool
) -> dict[str, int]:
    """Returns the compile-time constants of `attention_kernel`. `merge_kernel` also gets those named in `OF_MERGE`."""
    group, sizes = num_heads // num_kv_heads, Sizes.of(dtype, head_dim)
    assert group <= sizes.tile
    return {
        "group": group,
        "padded_group": padded_group(group),
        "tile": sizes.tile,
        "head_dim": head_dim,
        "padded_dim": max(16, triton.next_power_of_2(head_dim)),
        "path_len": path_len,
        "block_size": block_size,
        "split_len": SPLIT,
        "keys_per_step": sizes.keys_per_step,
        "is_split": is_split,
    }


OF_MERGE = ("head_dim", "padded_dim", "path_len", "split_len")


class PagedAttention:
    """Attention of the rows of `batch`. One object serves all layers of a step. Copies nothing to the host.

    `max_context`: upper bound of the contexts' lengths. It determines the number of programs that may share a context,
    but no bit of the result.
    """

    def __init__(self, batch: Batch, block_size: int, max_context: int, *, may_split: bool = True) -> None:
        self._batch = batch
        self._block_size = block_size
        self._num_splits = -(-max_context // SPLIT)
        self._may_split = may_split
        self._path_len, self._paths = 0, batch.positions
        if batch.paths is not None:
            self._path_len = -(-batch.paths.shape[1] // _PATH_STEP) * _PATH_STEP
            self._paths = F.pad(batch.paths, (0, self._path_len - batch.paths.shape[1]), value=-1)
        self._parts: tuple[torch.Tensor, ...] | None = None  # scratch memory that all layers share

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, span: int) -> torch.Tensor:
        """Returns the causal attention of every segment over its context, as `GatheredAttention.attend`.

        Rows after the last segment are padding, and get zeros.
        """
        batch, paths = self._batch, self._paths
        num_rows, num_heads, head_dim = query.shape
        num_kv_heads, num_segments, span = keys.shape[1], len(batch.context_lens), min(span, _LARGEST_SPAN)
        group = num_heads // num_kv_heads
        num_programs = num_tiles(num_rows, num_segments, group)
        is_split = self._may_split and uses_splits(num_rows, num_kv_heads, group, self._num_splits)
        compiled = constants(num_heads, num_kv_heads, head_dim, keys.dtype, self._block_size, self._path_len, is_split)
        parts = min(PARTS, self._num_splits) if is_split else 1
        output = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        sums, totals, maxima = self._workspace(query) if is_split else (output, output, output)
        attention_kernel[(num_programs, num_kv_heads, parts)](
            *(output, sums, totals, maxima, query, keys, values),
            *(batch.block_tables, batch.row_starts, batch.context_lens, batch.prefix_lens, batch.positions, paths),
            *(num_segments, num_heads, self._num_splits, parts, math.log2(math.e) / math.sqrt(head_dim), span),
            *(query.stride(0), output.stride(0), keys.stride(0), batch.block_tables.stride(0)),
            **compiled,
            **Sizes.of(keys.dtype, head_dim).options,
        )
        if is_split:
            merge_kernel[(num_rows, num_heads)](
                *(output, sums, totals, maxima),
                *(batch.row_starts, batch.context_lens, batch.positions, paths),
                *(num_segments, num_heads, self._num_splits, span, output.stride(0)),
                **{name: compiled[name] for name in OF_MERGE},
                **MERGE_OPTIONS,
            )
        return output

    def _workspace(self, query: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns buffers for weighted values, sums of weights and maxima of every row, head and split."""
        if self._parts is None:
            num_rows, num_heads, head_dim = query.shape
            shape = (num_rows, num_heads, self._num_splits)
            sums = torch.empty(*shape, head_dim, device=query.device)
            self._parts = (sums, torch.empty(shape, device=query.device), torch.empty(shape, device=query.device))
        return self._parts
