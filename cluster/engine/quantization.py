"""Weights in 8 or 4 bits, quantized layer by layer while a checkpoint loads.

Every operation rounds each number once, so all processors compute the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from cluster.config.workers import QuantizationName
from cluster.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Quantization:
    """Quantization of the layers' projections. Embedding, head and norms are not quantized."""

    bits: Literal[8, 4]
    group_size: int | None  # inputs that share a scale; None: all inputs of an output

    @classmethod
    def named(cls, name: QuantizationName, group_size: int) -> Quantization:
        """Returns the quantization called `name`.

        INT8 has a scale for each output. INT4 has only 16 values, so it has a scale for every `group_size` inputs of an
        output.
        """
        return cls(8, None) if name == "int8" else cls(4, group_size)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight in integers: `weight[o, i]` is about `values[o, i] * scales[o, i // group_size]`."""

    values: torch.Tensor  # int8 [out_features, in_features]; in 4 bits -8 to 7
    scales: torch.Tensor  # float32 [out_features, num_groups]
    bits: Literal[8, 4]
    dtype: torch.dtype  # dtype of the original weight, and of the model's activations

    @property
    def group_size(self) -> int:
        return self.values.shape[1] // self.scales.shape[1]

    def __getitem__(self, outputs: torch.Tensor) -> QuantizedWeight:
        return replace(self, values=self.values[outputs], scales=self.scales[outputs])

    def dequantize(self) -> torch.Tensor:
        """Returns the weight, float32 [out_features, in_features]."""
        return self.values * self.scales.repeat_interleave(self.group_size, dim=1)


def quantize(weight: torch.Tensor, quantization: Quantization) -> QuantizedWeight:
    """Quantizes `weight` [out_features, in_features], any float dtype, symmetrically to the nearest value.

    Raises ConfigurationError if the number of inputs is not a multiple of the group size.
    """
    in_features = weight.shape[1]
    group_size = quantization.group_size or in_features
    if in_features % group_size:
        raise ConfigurationError(
            f"a projection with {in_features} inputs does not divide into groups of {group_size}: choose another "
            "quantization_group_size"
        )
    largest = 2 ** (quantization.bits - 1) - 1
    groups = weight.float().reshape(weight.shape[0], -1, group_size)
    # As in torchao, the largest magnitude becomes half of the distance between the bounds, -largest - 1 and largest.
    scales = groups.abs().amax(dim=-1, keepdim=True) / (largest + 0.5)
    scales = scales.clamp(min=torch.finfo(torch.float32).smallest_normal)
    values = (groups * (1.0 / scales)).round().clamp(-largest - 1, largest).to(torch.int8)
    return QuantizedWeight(values.view(weight.shape), scales[..., 0], quantization.bits, weight.dtype)
