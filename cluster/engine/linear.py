"""A matrix product with weights laid out for the machine that runs it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

# The number of rows oneDNN lays weights out for: a verify step's. Rows beyond it still work.
_PACKED_FOR_ROWS = 8


class Linear:
    """`y = x @ weight.T + bias`, where `weight` is [out_features, in_features].

    On CPU the weight is reordered once into oneDNN's blocked layout: F.linear would lay it out again at every call
    with more than one row, which costs more than the product (`bench/linear.py`).
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._bias = bias
        self._packed = weight.device.type == "cpu" and torch._C._has_mkldnn
        if self._packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR_ROWS)
        self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [num_tokens, in_features] → [num_tokens, out_features]."""
        if self._packed:
            product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return product
        return F.linear(x, self._weight, self._bias)
