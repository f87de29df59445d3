"""Packs weights in the order in which the CPU kernels read them (`kernels/linear_portable.c` and `kernels/blocks.h`).

The last panel is padded with zeros, without a copy of the whole weight.
"""

from __future__ import annotations

import enum

import torch
import torch.nn.functional as F

from cluster.engine import huge_pages
from cluster.engine.cpu_kernels import LANES, InstructionSet

_WIDE_PANEL = 64  # outputs whose weights are stored together, as in linear_portable.c
_BLOCK = 32  # inputs, and outputs, of a block, as in blocks.h


class Format(enum.IntEnum):
    """Format of packed weights, numbered as in kernels.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3


def pack_weight(
    weight: torch.Tensor, weight_format: Format, group_size: int, instruction_set: InstructionSet
) -> torch.Tensor:
    """Packs `weight` [out_features, in_features] into [panels, ...]. INT4 weights are given as int8."""
    out_features, n = weight.shape
    is_int4 = weight_format is Format.INT4
    if instruction_set is InstructionSet.PORTABLE:
        panel, fill = _WIDE_PANEL, _FILL_WIDE[weight_format]
        shape = (n // 2, _WIDE_PANEL) if is_int4 else (n, _WIDE_PANEL)
    else:
        panel, fill = _BLOCK, _FILL_BLOCKS[weight_format]
        if group_size % _BLOCK:  # rare, so a copy is cheap enough
            padding = -group_size % _BLOCK
            weight = F.pad(weight.view(out_features, -1, group_size), (0, padding)).flatten(1)
            n = weight.shape[1]
        shape = (n // _BLOCK, _BLOCK * _BLOCK // (2 if is_int4 else 1))
    num_whole, num_panels = out_features // panel, -(-out_features // panel)
    panels = huge_pages.zeros((num_panels, *shape), torch.uint8 if is_int4 else weight.dtype)
    fill(panels[:num_whole], weight[: num_whole * panel])
    if num_whole < num_panels:
        last = weight.new_zeros(panel, n)
        last[: out_features - num_whole * panel] = weight[num_whole * panel :]
        fill(panels[num_whole:], last)
    return panels


def pack_scales(scales: torch.Tensor, instruction_set: InstructionSet) -> torch.Tensor:
    """Packs `scales` [out_features, groups] into [panels, groups, outputs of a panel]."""
    panel = _WIDE_PANEL if instruction_set is InstructionSet.PORTABLE else _BLOCK
    padded = F.pad(scales, (0, 0, 0, -scales.shape[0] % panel))
    return padded.view(-1, panel, scales.shape[1]).transpose(1, 2).contiguous()


def _fill_wide(panels: torch.Tensor, weight: torch.Tensor) -> None:
    """Fills `panels` [panels, n, 64]."""
    num_panels, n, _ = panels.shape
    panels.copy_(weight.view(num_panels, _WIDE_PANEL, n).transpose(1, 2))


def _fill_wide_halves(panels: torch.Tensor, weight: torch.Tensor) -> None:
    num_panels, n, _ = panels.shape
    halves = weight.view(num_panels, 2, 2, LANES, n)
    panels.view(num_panels, n, 2, LANES, 2).copy_(halves.permute(0, 4, 1, 3, 2))


def _fill_wide_nibbles(panels: torch.Tensor, weight: torch.Tensor) -> None:
    """Fills `panels` [panels, n / 2, 64]."""
    num_panels, num_pairs, _ = panels.shape
    assert weight.shape[1] == 2 * num_pairs
    nibbles = (weight & 0xF).view(torch.uint8).view(num_panels, 4, LANES, num_pairs, 2)
    # [panels, pairs of inputs, lane, input of the pair, quarter of the panel], two quarters a byte
    nibbles = nibbles.permute(0, 3, 2, 4, 1)
    panels.view(num_panels, num_pairs, LANES, 2, 2).copy_(nibbles[..., 0::2] | nibbles[..., 1::2] << 4)


def _in_blocks(weight: torch.Tensor, panels: torch.Tensor) -> torch.Tensor:
    """Returns a view of `weight` as [panels, blocks, tile, pair, output, input of the pair]."""
    num_panels, num_blocks, _ = panels.shape
    return weight.view(num_panels, 2, LANES, num_blocks, LANES, 2).permute(0, 3, 1, 4, 2, 5)


def _fill_blocks(panels: torch.Tensor, weight: torch.Tensor) -> None:
    """Fills `panels` [panels, blocks, 1024]."""
    blocks = _in_blocks(weight, panels)
    panels.view(blocks.shape).copy_(blocks)


def _fill_blocks_of_bytes(panels: torch.Tensor, weight: torch.Tensor) -> None:
    blocks = _in_blocks(weight, panels).transpose(4, 5)
    panels.view(blocks.shape).copy_(blocks)


def _fill_blocks_of_nibbles(panels: torch.Tensor, weight: torch.Tensor) -> None:
    """Fills `panels` [panels, blocks, 512]."""
    num_panels, num_blocks, _ = panels.shape
    nibbles = _in_blocks((weight & 0xF).view(torch.uint8), panels)
    # [panels, blocks, tile, four pairs, output, input of the pair, pair of the four], two pairs a byte
    fours = nibbles.view(num_panels, num_blocks, 2, 4, 4, LANES, 2).permute(0, 1, 2, 3, 5, 6, 4)
    panels.view(num_panels, num_blocks, 2, 4, LANES, 2, 2).copy_(fours[..., 0::2] | fours[..., 1::2] << 4)


_FILL_WIDE = {
    Format.FLOAT32: _fill_wide,
    Format.BFLOAT16: _fill_wide_halves,
    Format.INT8: _fill_wide,
    Format.INT4: _fill_wide_nibbles,
}
_FILL_BLOCKS = {
    Format.BFLOAT16: _fill_blocks,
    Format.INT8: _fill_blocks_of_bytes,
    Format.INT4: _fill_blocks_of_nibbles,
}
