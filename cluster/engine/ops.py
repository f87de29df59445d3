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


class Ops(Protocol):
    """The operators of a model, for one device and dtype. Activations are [num_tokens, features]."""

    activation_dtype: torch.dtype
    is_invariant: bool  # whether a row has the same bits whatever the other rows and the cut of the work

    def make_linear(self, weight: torch.Tensor | QuantizedWeight) -> Linear:
        """The product with `weight` [out_features, in_features]."""

    def make_norm_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """`weight` [hidden_size] as `add_rms_norm` wants it."""

    def add_rms_norm(self, hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        """Adds `delta` to `hidden` in place; returns the norm of the sum times `weight`."""

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(first half) * second half: [num_tokens, 2 * size] → [num_tokens, size]."""

    def attention(self, qkv: torch.Tensor, layer: int, kv_cache: KVCache, batch: Batch) -> torch.Tensor:
        """Rotates queries and keys, stores keys and values, attends: → [num_tokens, q_size]. May overwrite `qkv`."""


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

    def make_linear(self, weight: torch.Tensor | QuantizedWeight) -> Linear:
        if isinstance(weight, QuantizedWeight):
            return QuantizedLinear(weight, self.activation_dtype)
        if weight.device.type == "cpu" and torch._C._has_mkldnn:
            return PackedLinear(weight)
        return PlainLinear(weight)

    def make_norm_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def add_rms_norm(self, hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        if delta is not None:
            hidden += delta
        normed = F.rms_norm(hidden.float(), (hidden.shape[-1],), eps=self._config.rms_norm_eps)
        return weight * normed.to(hidden.dtype)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def attention(self, qkv: torch.Tensor, layer: int, kv_cache: KVCache, batch: Batch) -> torch.Tensor:
        config = self._config
        heads = qkv.view(len(qkv), -1, config.head_dim)
        # Queries and keys are neighbours, so one rotation serves both.
        to_rotate = heads[:, : -config.num_kv_heads]
        turned = to_rotate.roll(config.head_dim // 2, dims=-1)
        rotated = to_rotate * self._cos[batch.positions] + turned * self._signed_sin[batch.positions]
        query, keys = rotated[:, : config.num_heads], rotated[:, config.num_heads :]
        kv_cache.write(layer, keys, heads[:, -config.num_kv_heads :], batch.slots)
        return paged_attention(query, kv_cache, layer, batch).flatten(1)


def rotary_table(config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every position, [max_position_embeddings, head_dim / 2] (Su et al., arXiv 2104.09864)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    return angles.cos(), angles.sin()
