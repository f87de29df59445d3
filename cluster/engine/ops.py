"""What a decoder layer computes, and the PyTorch form of it, which runs on every device."""

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


class Ops(Protocol):
    """The operators of a model, for one device and dtype. Activations are [num_tokens, features]."""

    activation_dtype: torch.dtype
    is_invariant: bool  # whether a row has the same bits whatever the other rows and the cut of the work

    def make_linear(self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None = None) -> Linear:
        """The product with `weight` [out_features, in_features], plus `bias` [out_features]."""

    def make_norm_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """`weight` as `add_rms_norm` ([hidden_size]) and `attention` want it."""

    def add_rms_norm(self, hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        """Adds `delta` to `hidden` in place; returns the norm of the sum times `weight`."""

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(first half) * second half: [num_tokens, 2 * size] → [num_tokens, size]."""

    def attention(
        self, qkv: torch.Tensor, layer: int, kv_cache: KVCache, batch: Batch, qk_norm: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rotates queries and keys, stores keys and values, attends: → [num_tokens, q_size]. May overwrite `qkv`.

        `qk_norm` [num_heads + num_kv_heads, head_dim]: weights of the norm of each query and key before they are
        rotated, where the model has one.
        """


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

    def add_rms_norm(self, hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        if delta is not None:
            hidden += delta
        return self._rms_norm(hidden, weight)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def attention(
        self, qkv: torch.Tensor, layer: int, kv_cache: KVCache, batch: Batch, qk_norm: torch.Tensor | None = None
    ) -> torch.Tensor:
        config = self._config
        heads = qkv.view(len(qkv), -1, config.head_dim)
        # Queries and keys are neighbours, so one rotation serves both.
        to_rotate = heads[:, : -config.num_kv_heads]
        if qk_norm is not None:
            to_rotate = self._rms_norm(to_rotate, qk_norm)
        turned = to_rotate.roll(config.head_dim // 2, dims=-1)
        rotated = to_rotate * self._cos[batch.positions] + turned * self._signed_sin[batch.positions]
        query, keys = rotated[:, : config.num_heads], rotated[:, config.num_heads :]
        kv_cache.write(layer, keys, heads[:, -config.num_kv_heads :], batch.slots)
        return paged_attention(query, kv_cache, layer, batch, config.attention_span(layer)).flatten(1)

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(x.float(), (x.shape[-1],), eps=self._config.rms_norm_eps)
        return weight * normed.to(x.dtype)
