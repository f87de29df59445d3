"""Matrix products of `InvariantTritonModel`, whose rows have the same bits in every batch."""

from __future__ import annotations

import torch

from cluster.engine.gpu_kernels.product import product
from cluster.engine.linear import Linear
from cluster.engine.quantization import QuantizedWeight
from cluster.errors import ConfigurationError


class FixedOrderLinear:
    """A `Linear` that uses `product`, with the same order of sums for any number of rows."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.num_bytes = weight.nbytes
        self._weight, self._bias = weight.contiguous(), bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return product(x, self._weight, self._bias)


class FixedOrderWeightFormat:
    """A `WeightFormat` for products that sum in a fixed order. Raises ConfigurationError for quantized weights."""

    def make_linear(self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None = None) -> Linear:
        if isinstance(weight, QuantizedWeight):
            raise ConfigurationError(
                f"quantization int{weight.bits} with numerics 'invariant' on a GPU: integer products have no fixed "
                "order there; leave quantization unset, or use numerics 'fast'"
            )
        return FixedOrderLinear(weight, bias)

    def make_norm_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.contiguous()
