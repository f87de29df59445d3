"""A matrix product with kernels and weight layout chosen for the machine that runs it."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

try:
    from cluster.engine import _linear
except ImportError:  # no C compiler when the package was installed
    _linear = None  # type: ignore[assignment]

# Up to here a step is bound by reading weights, and the kernel of our own is the fastest; beyond, by arithmetic,
# where F.linear is (`bench/linear.py`).
_MAX_KERNEL_ROWS = 16
# The number of rows oneDNN lays weights out for when it has to serve the few rows itself.
_PACKED_FOR_ROWS = 8


class Linear(Protocol):
    """`y = x @ weight.T`, where `weight` is [out_features, in_features]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [num_tokens, in_features] → [num_tokens, out_features]."""


def make_linear(weight: torch.Tensor) -> Linear:
    """The fastest product with `weight` on its device."""
    weight = weight.contiguous()
    if weight.device.type != "cpu":
        return PlainLinear(weight)
    if has_kernel() and weight.dtype in (torch.float32, torch.bfloat16):
        return KernelLinear(weight)
    if torch._C._has_mkldnn:
        return PackedLinear(weight)
    return PlainLinear(weight)


def has_kernel() -> bool:
    """Whether the kernel of our own was built and runs on this processor."""
    return _linear is not None and _linear.is_supported()


class PlainLinear:
    """PyTorch's own."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight)


class PackedLinear:
    """oneDNN with the weight reordered once into its blocked layout.

    F.linear would lay it out again at every call with more than one row, which costs more than the product.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, None, "none", [], "")
        return product


class KernelLinear:
    """Few rows through `_linear.c`, which reads each weight once for all of them; many through F.linear."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight
        self._address = weight.data_ptr()
        self._out_features, self._in_features = weight.shape
        self._is_bfloat16 = int(weight.dtype == torch.bfloat16)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        num_rows = x.shape[0]
        if not 0 < num_rows <= _MAX_KERNEL_ROWS:
            return F.linear(x, self._weight)
        assert x.dtype == self._weight.dtype
        x = x.contiguous()
        y = x.new_empty(num_rows, self._out_features)
        _linear.linear(
            x.data_ptr(),
            self._address,
            y.data_ptr(),
            num_rows,
            self._in_features,
            self._out_features,
            self._is_bfloat16,
            torch.get_num_threads(),
        )
        return y
