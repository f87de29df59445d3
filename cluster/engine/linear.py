"""Matrix products by PyTorch: plain, with weights reordered for few rows, and with quantized weights."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from cluster.engine.quantization import QuantizedWeight

# The number of rows for which oneDNN reorders weights.
_PACKED_FOR_ROWS = 8


class Linear(Protocol):
    """`y = x @ weight.T`, where `weight` is [out_features, in_features]; plus `bias` [out_features], if any."""

    num_bytes: int  # size of the stored weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [num_tokens, in_features] → [num_tokens, out_features]."""


class PlainLinear:
    """Product by `F.linear`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.num_bytes = weight.nbytes
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)


class PackedLinear:
    """Product by oneDNN, with the weight reordered once into its blocked layout.

    F.linear would reorder it at every call with more than one row, which costs more than the product.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.num_bytes = weight.nbytes
        self._weight: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR_ROWS)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return product


class QuantizedLinear:
    """Product with a weight stored in integers, which every call converts to floats: saves memory, not time."""

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> None:
        self.num_bytes = weight.values.nbytes + weight.scales.nbytes
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight.dequantize().to(x.dtype), self._bias)


def _can_pack(dtype: torch.dtype) -> bool:
    """Returns True if oneDNN has products of packed weights in `dtype` on this processor."""
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class TorchWeightFormat:
    """Weights for PyTorch's operators (a `WeightFormat`)."""

    def make_linear(self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None = None) -> Linear:
        if isinstance(weight, QuantizedWeight):
            return QuantizedLinear(weight, bias)
        if weight.device.type == "cpu" and torch._C._has_mkldnn and _can_pack(weight.dtype):
            return PackedLinear(weight, bias)
        return PlainLinear(weight, bias)

    def make_norm_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return weight
