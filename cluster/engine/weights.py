"""The weights of a decoder, in the format of its operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from cluster.engine.linear import Linear
from cluster.engine.quantization import QuantizedWeight


class WeightFormat(Protocol):
    """Converts weights to the format of the operators that will read them. Called while a model loads."""

    def make_linear(self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None = None) -> Linear:
        """Returns the product with `weight` [out_features, in_features], plus `bias` [out_features]."""

    def make_norm_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Returns a norm's `weight` in the operators' format."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    input_norm: torch.Tensor | None  # [hidden_size]; None: a first layer whose inputs are given (`LayerInputs`)
    qkv: Linear  # hidden_size (2 * hidden_size in the first layer of EAGLE-3) → q_size + 2 * kv_size
    qk_norm: torch.Tensor | None  # [num_heads + num_kv_heads, head_dim]
    output: Linear  # q_size → hidden_size
    post_attention_norm: torch.Tensor  # [hidden_size]
    gate_up: Linear  # hidden_size → 2 * intermediate_size
    down: Linear  # intermediate_size → hidden_size
    output_norm: torch.Tensor | None = None  # [hidden_size], of what `output` computes; None: it is added as it is
    down_norm: torch.Tensor | None = None  # likewise of `down`

    @property
    def linears(self) -> tuple[Linear, Linear, Linear, Linear]:
        """The projections in the order in which they run."""
        return self.qkv, self.output, self.gate_up, self.down


@dataclass(frozen=True, slots=True)
class ModelWeights:
    embedding: torch.Tensor  # [vocab_size, hidden_size], in the dtype of the model and on its device
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor | None  # [hidden_size]; None: no norm before the output layer
    head: Linear  # hidden_size → vocab_size

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def num_bytes_read(self) -> int:
        """Bytes of the weights that a step reads, for any number of rows."""
        linears = [linear for layer in self.layers for linear in layer.linears]
        return sum(linear.num_bytes for linear in (*linears, self.head))
