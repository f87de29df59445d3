"""Matrix products of models on a GPU: kernels of this project in Triton, or PyTorch's."""

from __future__ import annotations

import torch

from cluster.engine.gpu_kernels.product import PackedWeight, product
from cluster.engine.linear import Linear, TorchWeightFormat
from cluster.engine.quantization import QuantizedWeight
from cluster.errors import ConfigurationError


class FixedOrderLinear:
    """A `Linear` that uses `product`, with the same order of sums for any number of rows."""

    def __init__(self, weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None = None) -> None:
        self.num_bytes = weight.num_bytes if isinstance(weight, PackedWeight) else weight.nbytes
        self._weight = weight if isinstance(weight, PackedWeight) else weight.contiguous()
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return product(x, self._weight, self._bias)


class GpuWeightFormat(TorchWeightFormat):
    """PyTorch's products; quantized weights use the Triton product if their groups are multiples of 32."""

    def make_linear(self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None = None) -> Linear:
        packed = PackedWeight.of(weight) if isinstance(weight, QuantizedWeight) else None
        return super().make_linear(weight, bias) if packed is None else FixedOrderLinear(packed, bias)


class FixedOrderWeightFormat:
    """A `WeightFormat` with a fixed order of sums. Raises ConfigurationError for groups that do not allow it."""

    def make_linear(self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None = None) -> Linear:
        if not isinstance(weight, QuantizedWeight):
            return FixedOrderLinear(weight, bias)
        packed = PackedWeight.of(weight)
        if packed is None:
            raise ConfigurationError(
                f"quantization int{weight.bits} with numerics 'invariant' on a GPU needs groups of a multiple of 32 "
                f"inputs, not {weight.group_size}: choose another quantization_group_size, leave quantization unset, "
                "or use numerics 'fast'"
            )
        return FixedOrderLinear(packed, bias)

    def make_norm_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.contiguous()
