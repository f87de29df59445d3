"""How a model is computed on a device: the interface, and its form in plain PyTorch, which runs on every device."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from cluster.engine.attention import paged_attention
from cluster.engine.batch import Batch
from cluster.engine.kv_cache import KVCache
from cluster.engine.linear import Linear, PackedLinear, PlainLinear, QuantizedLinear
from cluster.engine.model_config import ModelConfig
from cluster.engine.quantization import QuantizedWeight
from cluster.engine.rope import rotary_table
from cluster.engine.weights import LayerWeights, ModelWeights


class Ops(Protocol):
    """How a model is computed on one device in one dtype."""

    is_invariant: bool  # whether a row has the same bits whatever the other rows and the cut of the work

    def make_linear(self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None = None) -> Linear:
        """The product with `weight` [out_features, in_features], plus `bias` [out_features]."""

    def make_norm_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """`weight` of a norm as these operators want it."""

    def decode(self, weights: ModelWeights, batch: Batch, kv_cache: KVCache) -> torch.Tensor:
        """A forward pass, which writes the KV of every row: → float32 [num_logit_rows, vocab_size]."""


class TorchOps:
    """Plain PyTorch, whose products choose a kernel by the number of rows.

    Arithmetic follows `transformers`: norms and rotary angles in float32.
    """

    is_invariant = False

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._config = config
        cos, sin = rotary_table(config)
        # The sign is the one a rotation gives the second half of a head.
        self._cos = torch.cat([cos, cos], dim=-1)[:, None].to(device, dtype)
        self._signed_sin = torch.cat([-sin, sin], dim=-1)[:, None].to(device, dtype)

    def make_linear(self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None = None) -> Linear:
        if isinstance(weight, QuantizedWeight):
            return QuantizedLinear(weight, bias, self._dtype)
        if weight.device.type == "cpu" and torch._C._has_mkldnn:
            return PackedLinear(weight, bias)
        return PlainLinear(weight, bias)

    def make_norm_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def decode(self, weights: ModelWeights, batch: Batch, kv_cache: KVCache) -> torch.Tensor:
        hidden = F.embedding(batch.token_ids, weights.embedding)
        for index, layer in enumerate(weights.layers):
            normed = self._norm(hidden, layer.input_norm)
            hidden = hidden + layer.output(self._attention(index, layer, normed, kv_cache, batch))
            gate, up = layer.gate_up(self._norm(hidden, layer.post_attention_norm)).chunk(2, dim=-1)
            hidden = hidden + layer.down(F.silu(gate) * up)
        return weights.head(self._norm(hidden[batch.logit_rows], weights.norm)).float()

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(x.float(), (x.shape[-1],), eps=self._config.rms_norm_eps)
        return weight * normed.to(x.dtype)

    def _attention(
        self, index: int, layer: LayerWeights, hidden: torch.Tensor, kv_cache: KVCache, batch: Batch
    ) -> torch.Tensor:
        """→ [num_tokens, q_size]"""
        config = self._config
        heads = layer.qkv(hidden).view(len(hidden), -1, config.head_dim)
        # Queries and keys are neighbours, so one norm and one rotation serve both.
        to_rotate = heads[:, : -config.num_kv_heads]
        if layer.qk_norm is not None:
            to_rotate = self._norm(to_rotate, layer.qk_norm)
        turned = to_rotate.roll(config.head_dim // 2, dims=-1)
        rotated = to_rotate * self._cos[batch.positions] + turned * self._signed_sin[batch.positions]
        query, keys = rotated[:, : config.num_heads], rotated[:, config.num_heads :]
        kv_cache.write(index, keys, heads[:, -config.num_kv_heads :], batch.slots)
        return self._attend(query, index, kv_cache, batch).flatten(1)

    def _attend(self, query: torch.Tensor, index: int, kv_cache: KVCache, batch: Batch) -> torch.Tensor:
        """[num_tokens, num_heads, head_dim], with this step's keys and values in the cache → the same shape."""
        return paged_attention(query, kv_cache, index, batch, self._config.attention_span(index))
