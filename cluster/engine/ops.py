"""What a decoder layer computes, and the PyTorch form of it, which runs on every device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from cluster.engine.attention import paged_attention
from cluster.engine.batch import Batch
from cluster.engine.kv_cache import KVCache
from cluster.engine.layer import LayerWeights
from cluster.engine.linear import Linear, PackedLinear, PlainLinear, QuantizedLinear
from cluster.engine.model_config import ModelConfig
from cluster.engine.quantization import QuantizedWeight
from cluster.engine.rope import rotary_table


class Ops(Protocol):
    """The operators of a model, for one device and dtype. Activations are [num_tokens, features]."""

    activation_dtype: torch.dtype
    is_invariant: bool  # whether a row has the same bits whatever the other rows and the cut of the work

    def make_linear(self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None = None) -> Linear:
        """The product with `weight` [out_features, in_features], plus `bias` [out_features]."""

    def make_norm_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """`weight` as these operators want it."""

    def norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The root mean square norm of [num_tokens, hidden_size], times `weight`."""

    def run_layers(
        self, hidden: torch.Tensor, layers: Sequence[LayerWeights], kv_cache: KVCache, batch: Batch
    ) -> torch.Tensor:
        """Runs `layers`, writing the KV of every row: [num_tokens, hidden_size] in and out. May overwrite `hidden`."""


class TorchOps:
    """Plain PyTorch, whose products choose a kernel by the number of rows.

    Arithmetic follows `transformers`: norms and rotary angles in float32.
    """

    is_invariant = False

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.activation_dtype = dtype
        self._config = config
        cos, sin = rotary_table(config)
        # The sign is the one a rotation gives the second half of a head.
        self._cos = torch.cat([cos, cos], dim=-1)[:, None].to(device, dtype)
        self._signed_sin = torch.cat([-sin, sin], dim=-1)[:, None].to(device, dtype)

    def make_linear(self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None = None) -> Linear:
        if isinstance(weight, QuantizedWeight):
            return QuantizedLinear(weight, bias, self.activation_dtype)
        if weight.device.type == "cpu" and torch._C._has_mkldnn:
            return PackedLinear(weight, bias)
        return PlainLinear(weight, bias)

    def make_norm_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(hidden.float(), (hidden.shape[-1],), eps=self._config.rms_norm_eps)
        return weight * normed.to(hidden.dtype)

    def run_layers(
        self, hidden: torch.Tensor, layers: Sequence[LayerWeights], kv_cache: KVCache, batch: Batch
    ) -> torch.Tensor:
        for index, layer in enumerate(layers):
            normed = self.norm(hidden, layer.input_norm)
            hidden = hidden + layer.output(self._attention(index, layer, normed, kv_cache, batch))
            gate, up = layer.gate_up(self.norm(hidden, layer.post_attention_norm)).chunk(2, dim=-1)
            hidden = hidden + layer.down(F.silu(gate) * up)
        return hidden

    def _attention(
        self, index: int, layer: LayerWeights, hidden: torch.Tensor, kv_cache: KVCache, batch: Batch
    ) -> torch.Tensor:
        """→ [num_tokens, q_size]"""
        config = self._config
        heads = layer.qkv(hidden).view(len(hidden), -1, config.head_dim)
        # Queries and keys are neighbours, so one norm and one rotation serve both.
        to_rotate = heads[:, : -config.num_kv_heads]
        if layer.qk_norm is not None:
            to_rotate = self.norm(to_rotate, layer.qk_norm)
        turned = to_rotate.roll(config.head_dim // 2, dims=-1)
        rotated = to_rotate * self._cos[batch.positions] + turned * self._signed_sin[batch.positions]
        query, keys = rotated[:, : config.num_heads], rotated[:, config.num_heads :]
        kv_cache.write(index, keys, heads[:, -config.num_kv_heads :], batch.slots)
        return paged_attention(query, kv_cache, index, batch, config.attention_span(index)).flatten(1)
