"""Weights in 8 or 4 bits, made by torchao from those of a checkpoint while it loads, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
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

        INT8 has a scale for each output; INT4, with 16 values, has one for every `group_size` of an output's inputs.
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

    def dequantize(self) -> torch.Tensor:
        """Returns the weight, float32 [out_features, in_features]."""
        return self.values * self.scales.repeat_interleave(self.group_size, dim=1)


def quantize(weight: torch.Tensor, quantization: Quantization) -> QuantizedWeight:
    """Quantizes symmetrically, to the nearest. `weight` [out_features, in_features], any float dtype.

    Raises ConfigurationError if its inputs do not divide into groups.
    """
    # Imported here: it takes a second, which a model in bfloat16 need not wait for.
    from torchao.quantization.quant_primitives import MappingType, choose_qparams_affine, quantize_affine

    in_features = weight.shape[1]
    group_size = quantization.group_size or in_features
    if in_features % group_size:
        raise ConfigurationError(
            f"a projection with {in_features} inputs does not divide into groups of {group_size}: choose another "
            "quantization_group_size"
        )
    bounds = (-(2 ** (quantization.bits - 1)), 2 ** (quantization.bits - 1) - 1)
    scales, zero_points = choose_qparams_affine(
        weight.float(), MappingType.SYMMETRIC, (1, group_size), torch.int8, *bounds, scale_dtype=torch.float32
    )
    values = quantize_affine(weight.float(), (1, group_size), scales, zero_points, torch.int8, *bounds)
    return QuantizedWeight(values, scales.view(weight.shape[0], -1), quantization.bits, weight.dtype)
