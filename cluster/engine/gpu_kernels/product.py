"""Matrix products in Triton whose rows have the same bits in every batch: one order of sums for any number of rows.

A library chooses a kernel by the number of rows, and the kernel determines the order in which an output is summed (He
and Thinking Machines Lab, "Defeating Nondeterminism in LLM Inference", 2025). In this module the order depends only on
the weight's shape and the dtype:

    parts    The inputs are cut into `num_parts` parts, which are added in order ("split-K").
    blocks   A part is summed from its start in blocks of `BLOCKS` inputs. One `tl.dot` adds a block in float32.

A step with few rows has a program for every part of a tile, and a second kernel adds the parts' sums. A prompt has
enough tiles to fill a GPU, so one program sums all parts of a tile. Both ways add the same numbers in the same order,
and neither kernel may fuse a product with a sum outside of `tl.dot`. Tiles of different heights use different
instructions. `check_invariance` tests on the user's GPU that these instructions sum a block in the same order.

Weights in 8 or 4 bits are multiplied as they are read: a block lies within one group, so the block's sum is multiplied
by the group's scale. The integers are exact in every dtype of the activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from cluster.engine.gpu_kernels.product_tiles import BLOCKS, Tile, choose_tile, num_parts, uses_programs_of_parts
from cluster.engine.quantization import QuantizedWeight

ADD_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
ADD_COLUMNS = 1024  # outputs of a program of `add_parts_kernel`


@triton.jit  # type: ignore[untyped-decorator]
def _sum_of_blocks(  # type: ignore[no-untyped-def]
    x_rows, weight_rows, scales, first, last, num_inputs, num_outputs,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr, block: tl.constexpr, is_even: tl.constexpr,
    bits: tl.constexpr, blocks_per_group: tl.constexpr,
):  # fmt: skip
    """Adds the blocks `first` to `last` of a tile in their order: float32 [tile_rows, tile_columns]."""
    summed = tl.zeros([tile_rows, tile_columns], tl.float32)
    for index in range(first, last):
        if bits > 0:
            half: tl.constexpr = block // 2
            place = index * block + tl.arange(0, half)
            first_x = tl.load(x_rows[:, None] + place[None, :])
            second_x = tl.load(x_rows[:, None] + (place + half)[None, :])
            if bits == 8:
                first_weights = tl.load(weight_rows[:, None] + place[None, :])
                second_weights = tl.load(weight_rows[:, None] + (place + half)[None, :])
            else:
                packed = tl.load(weight_rows[:, None] + (index * half + tl.arange(0, half))[None, :]).to(tl.int32)
                first_weights, second_weights = (packed & 15) - 8, (packed >> 4) - 8
            first_weights = first_weights.to(tl.float32).to(first_x.dtype)
            second_weights = second_weights.to(tl.float32).to(first_x.dtype)
            of_block = tl.zeros([tile_rows, tile_columns], tl.float32)
            of_block = tl.dot(first_x, tl.trans(first_weights), of_block, input_precision="ieee")
            of_block = tl.dot(second_x, tl.trans(second_weights), of_block, input_precision="ieee")
            scale = tl.load(scales + index // blocks_per_group * num_outputs).to(tl.float32)
            summed += of_block * scale[None, :]
        else:
            place = index * block + tl.arange(0, block)
            if is_even:
                left = tl.load(x_rows[:, None] + place[None, :])
                right = tl.load(weight_rows[:, None] + place[None, :])
            else:
                is_there = (place < num_inputs)[None, :]
                left = tl.load(x_rows[:, None] + place[None, :], mask=is_there, other=0.0)
                right = tl.load(weight_rows[:, None] + place[None, :], mask=is_there, other=0.0)
            summed = tl.dot(left, tl.trans(right), summed, input_precision="ieee")
    return summed


# Not specialized: the number of rows changes from step to step, and parts with one block must use the same code.
@triton.jit(do_not_specialize=["num_rows", "parts", "blocks_per_part"])  # type: ignore[untyped-decorator]
def product_kernel(  # type: ignore[no-untyped-def]
    output, part_sums, x, weight, scales, bias, num_rows, num_outputs, num_inputs, parts, blocks_per_part,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr, block: tl.constexpr,
    is_even: tl.constexpr, has_bias: tl.constexpr, is_split: tl.constexpr,
    bits: tl.constexpr, blocks_per_group: tl.constexpr,
):  # fmt: skip
    """Program (tile of rows, tile of outputs, part): writes its part's sums if `is_split`, otherwise the output."""
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows).to(tl.int64)
    column = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns).to(tl.int64)
    is_output = (row < num_rows)[:, None] & (column < num_outputs)[None, :]
    # Rows past the end read the last row, and their results are not stored.
    x_rows = x + tl.minimum(row, num_rows - 1) * num_inputs
    column_there = tl.minimum(column, num_outputs - 1)
    weight_rows = weight + column_there * (num_inputs // 2 if bits == 4 else num_inputs)
    scales += column_there
    num_blocks = tl.cdiv(num_inputs, block)
    if is_split:
        part = tl.program_id(2)
        summed = _sum_of_blocks(
            x_rows, weight_rows, scales, part * blocks_per_part, tl.minimum((part + 1) * blocks_per_part, num_blocks),
            num_inputs, num_outputs, tile_rows, tile_columns, block, is_even, bits, blocks_per_group,
        )  # fmt: skip
        place = (part * num_rows + row)[:, None] * num_outputs + column[None, :]
        tl.store(part_sums + place, summed, mask=is_output)
    else:
        total = tl.zeros([tile_rows, tile_columns], tl.float32)
        for part in range(parts):
            total += _sum_of_blocks(
                x_rows, weight_rows, scales, part * blocks_per_part,
                tl.minimum((part + 1) * blocks_per_part, num_blocks),
                num_inputs, num_outputs, tile_rows, tile_columns, block, is_even, bits, blocks_per_group,
            )  # fmt: skip
        if has_bias:
            total += tl.load(bias + column, mask=column < num_outputs, other=0.0).to(tl.float32)[None, :]
        tl.store(output + row[:, None] * num_outputs + column[None, :], total, mask=is_output)


@triton.jit(do_not_specialize=["num_rows", "parts"])  # type: ignore[untyped-decorator]
def add_parts_kernel(  # type: ignore[no-untyped-def]
    output, part_sums, bias, num_rows, num_outputs, parts, columns: tl.constexpr, has_bias: tl.constexpr
):  # fmt: skip
    """Program (row, range of outputs): adds the sums of the parts in their order."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    is_output = column < num_outputs
    total = tl.zeros([columns], tl.float32)
    for part in range(parts):
        total += tl.load(part_sums + (part * num_rows + row) * num_outputs + column, mask=is_output, other=0.0)
    if has_bias:
        total += tl.load(bias + column, mask=is_output, other=0.0).to(tl.float32)
    tl.store(output + row * num_outputs + column, total, mask=is_output)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A quantized weight, laid out for `product_kernel`."""

    values: torch.Tensor  # int8 [num_outputs, num_inputs], or two values a byte: uint8 [num_outputs, num_inputs / 2]
    scales: torch.Tensor  # [num_groups, num_outputs], in the dtype of the activations
    bits: int  # 8 or 4
    block: int  # inputs per block; with 4 bits, the low halves of a block's bytes are the first half of its inputs

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and inputs."""
        return self.values.shape[0], self.values.shape[1] * 8 // self.bits

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    @classmethod
    def of(cls, weight: QuantizedWeight) -> PackedWeight | None:
        """Packs `weight` for activations of its dtype. Returns None if no block divides its group size."""
        num_outputs = len(weight.values)
        block = next((b for b in _QUANTIZED_BLOCKS[weight.dtype.itemsize] if weight.group_size % b == 0), None)
        if block is None:
            return None
        values = weight.values.contiguous()
        if weight.bits == 4:
            halves = (values + 8).to(torch.uint8).view(num_outputs, -1, 2, block // 2)
            values = (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(num_outputs, -1)
        return cls(values, weight.scales.T.to(weight.dtype).contiguous(), weight.bits, block)


_QUANTIZED_BLOCKS = {2: (64, 32), 4: (32,)}
"Blocks of quantized weights, by bytes per activation. `tl.dot` needs 16 inputs, and a block is multiplied in halves."


def constants(
    tile: Tile,
    num_inputs: int,
    dtype: torch.dtype,
    *,
    has_bias: bool,
    is_split: bool,
    packed: PackedWeight | None = None,
) -> dict[str, Any]:
    """Returns the compile-time constants of `product_kernel`. `packed`: the weight if it is quantized."""
    block = BLOCKS[dtype.itemsize] if packed is None else packed.block
    return {
        "bits": 0 if packed is None else packed.bits,
        "blocks_per_group": 1 if packed is None else num_inputs // len(packed.scales) // block,
        "tile_rows": tile.num_rows,
        "tile_columns": tile.num_columns,
        "block": block,
        "is_even": num_inputs % block == 0,
        "has_bias": has_bias,
        "is_split": is_split,
    }


def options(tile: Tile) -> dict[str, Any]:
    """Returns the compile options of `product_kernel` for `tile`."""
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": False}


def product(x: torch.Tensor, weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Returns `x @ weight.T + bias` [num_rows, num_outputs], in the dtype of `x`, summed in float32.

    `x` is [num_rows, num_inputs] and `weight` [num_outputs, num_inputs]: float32, bfloat16 or float16, both the same.
    """
    tile = choose_tile(len(x), x.element_size())
    num_outputs, num_inputs = weight.shape
    is_split = uses_programs_of_parts(tile, len(x), num_outputs, num_parts(num_outputs, num_inputs))
    return product_by_tiles(x, weight, bias, tile, is_split=is_split)


def product_by_tiles(
    x: torch.Tensor, weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None, tile: Tile, *, is_split: bool
) -> torch.Tensor:
    """Returns `product`, computed with the given `tile` and `is_split`. These change no bit of the result."""
    x = x.contiguous()
    packed = weight if isinstance(weight, PackedWeight) else None
    values = weight.values if isinstance(weight, PackedWeight) else weight
    assert values.is_contiguous()
    num_rows, (num_outputs, num_inputs) = len(x), weight.shape
    output = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return output
    compiled = constants(tile, num_inputs, x.dtype, has_bias=bias is not None, is_split=is_split, packed=packed)
    parts = num_parts(num_outputs, num_inputs)
    blocks_per_part = triton.cdiv(triton.cdiv(num_inputs, compiled["block"]), parts)
    sums = torch.empty(parts, num_rows, num_outputs, device=x.device) if is_split else output
    given_bias = output if bias is None else bias
    grid = (triton.cdiv(num_rows, tile.num_rows), triton.cdiv(num_outputs, tile.num_columns), parts if is_split else 1)
    product_kernel[grid](
        *(output, sums, x, values, output if packed is None else packed.scales, given_bias),
        *(num_rows, num_outputs, num_inputs, parts, blocks_per_part),
        **compiled,
        **options(tile),
    )
    if is_split:
        add_parts_kernel[(num_rows, triton.cdiv(num_outputs, ADD_COLUMNS))](
            *(output, sums, given_bias, num_rows, num_outputs, parts),
            columns=ADD_COLUMNS,
            has_bias=bias is not None,
            **ADD_OPTIONS,
        )
    return output
