"""Matrix products by the CPU kernels (`kernels/linear.c`), and the weights in the order in which they read them."""

from __future__ import annotations

import enum

import torch

from cluster.engine.cpu_kernels import LANES, kernels
from cluster.engine.linear import Linear
from cluster.engine.quantization import QuantizedWeight

_PANEL = 64  # outputs whose weights lie together, as in kernels.h


class _Format(enum.IntEnum):
    """As in kernels.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3


class KernelLinear:
    """Float32 rows times a weight, which is laid out once in the order it is read (`kernels/linear.c`).

    `weight` is a Weight of kernels.h, as numbers; it holds as long as this object lives.
    """

    def __init__(self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None = None) -> None:
        if isinstance(weight, QuantizedWeight):
            weight_format = _Format.INT8 if weight.bits == 8 else _Format.INT4
            values, group_size = weight.values, weight.group_size
            self._scales = _lay_out(weight.scales, _Format.FLOAT32)
        else:
            weight_format = _Format.FLOAT32 if weight.dtype == torch.float32 else _Format.BFLOAT16
            values, group_size = weight, weight.shape[1]
            self._scales = torch.empty(0)
        self._bias = None if bias is None else bias.float()
        self._panels = _lay_out(values, weight_format)
        self.num_bytes = self._panels.nbytes + self._scales.nbytes
        self._out_features, in_features = values.shape
        self.weight = [
            self._panels.data_ptr(),
            self._scales.data_ptr(),
            0 if self._bias is None else self._bias.data_ptr(),
            in_features,
            self._out_features,
            group_size,
            weight_format,
        ]
        self._table = torch.tensor(self.weight, dtype=torch.int64)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.float32
        x = x.contiguous()
        y = x.new_empty(x.shape[0], self._out_features)
        kernels.linear(x.data_ptr(), self._table.data_ptr(), y.data_ptr(), x.shape[0], torch.get_num_threads())
        return y


class KernelWeightFormat:
    """Weights for the CPU kernels (a `WeightFormat`)."""

    def make_linear(self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None = None) -> Linear:
        return KernelLinear(weight, bias)

    def make_norm_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.float().contiguous()


def _lay_out(weight: torch.Tensor, weight_format: _Format) -> torch.Tensor:
    """[out_features, n] → [panels, n, 64] in the order that linear.c describes, with zeros in the last panel."""
    out_features, n = weight.shape
    num_whole, num_panels = out_features // _PANEL, -(-out_features // _PANEL)
    if weight_format is _Format.INT4:
        panels = weight.new_empty(num_panels, n // 2, _PANEL, dtype=torch.uint8)
    else:
        panels = weight.new_empty(num_panels, n, _PANEL)
    _fill(panels[:num_whole], weight[: num_whole * _PANEL], weight_format)
    if num_whole < num_panels:  # a padded copy of the last panel only, not of the whole weight
        last = weight.new_zeros(_PANEL, n)
        last[: out_features - num_whole * _PANEL] = weight[num_whole * _PANEL :]
        _fill(panels[num_whole:], last, weight_format)
    return panels


def _fill(panels: torch.Tensor, weight: torch.Tensor, weight_format: _Format) -> None:
    """`panels` from `weight` [64 * panels, n]."""
    num_panels, n = len(panels), weight.shape[1]
    if weight_format is _Format.BFLOAT16:
        halves = weight.reshape(num_panels, 2, 2, LANES, n)
        panels.view(num_panels, n, 2, LANES, 2).copy_(halves.permute(0, 4, 1, 3, 2))
    elif weight_format is _Format.INT4:
        assert n % 2 == 0
        nibbles = (weight & 0xF).view(torch.uint8).view(num_panels, 4, LANES, n // 2, 2)
        # [panels, pairs of inputs, lane, input of the pair, quarter of the panel], two quarters a byte
        nibbles = nibbles.permute(0, 3, 2, 4, 1)
        bytes_ = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
        panels.view(num_panels, n // 2, LANES, 2, 2).copy_(bytes_)
    else:
        panels.copy_(weight.reshape(num_panels, _PANEL, n).transpose(1, 2))
