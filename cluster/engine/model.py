"""A lean Llama-family decoder over a paged KV cache (Touvron et al., arXiv 2302.13971).

One forward pass takes a packed batch: no padding, no attention mask over sequences. Shapes are
[num_tokens, ...] throughout. Arithmetic follows `transformers` (RMSNorm and rotary angles in float32) so that
logits agree with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from cluster.engine.attention import paged_attention
from cluster.engine.batch import Batch
from cluster.engine.kv_cache import KVCache
from cluster.engine.linear import Linear
from cluster.engine.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class LayerWeights:
    input_norm: torch.Tensor  # [hidden_size]
    qkv: Linear  # hidden_size → q_size + 2 * kv_size
    output: Linear  # q_size → hidden_size
    post_attention_norm: torch.Tensor  # [hidden_size]
    gate_up: Linear  # hidden_size → 2 * intermediate_size
    down: Linear  # intermediate_size → hidden_size


@dataclass(frozen=True, slots=True)
class ModelWeights:
    embedding: torch.Tensor  # [vocab_size, hidden_size]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [hidden_size]
    head: Linear  # hidden_size → vocab_size


class LlamaModel:
    """The decoder. Holds weights only; the state of sequences is in the KV cache it is given."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self._weights = weights
        self._cos, self._sin = _rotary_table(config, dtype, device)

    @torch.inference_mode()
    def forward(self, batch: Batch, kv_cache: KVCache) -> torch.Tensor:
        """Writes the KV of every row of `batch`; returns logits of its logit rows, [num_logit_rows, vocab_size]."""
        eps = self.config.rms_norm_eps
        cos, sin = self._cos[batch.positions], self._sin[batch.positions]
        hidden = F.embedding(batch.token_ids, self._weights.embedding)
        for index, layer in enumerate(self._weights.layers):
            normed = _rms_norm(hidden, layer.input_norm, eps)
            hidden = hidden + self._attention(index, layer, normed, cos, sin, batch, kv_cache)
            normed = _rms_norm(hidden, layer.post_attention_norm, eps)
            gate, up = layer.gate_up(normed).chunk(2, dim=-1)
            hidden = hidden + layer.down(F.silu(gate) * up)
        wanted = _rms_norm(hidden[batch.logit_rows], self._weights.norm, eps)
        return self._weights.head(wanted)

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: Batch,
        kv_cache: KVCache,
    ) -> torch.Tensor:
        config = self.config
        qkv = layer.qkv(hidden).view(len(hidden), -1, config.head_dim)
        # Queries and keys are neighbours, so one rotation serves both.
        rotated = _rotate(qkv[:, : -config.num_kv_heads], cos, sin)
        query, keys = rotated[:, : config.num_heads], rotated[:, config.num_heads :]
        kv_cache.write(index, keys, qkv[:, -config.num_kv_heads :], batch.slots)
        attended = paged_attention(query, kv_cache.keys[index], kv_cache.values[index], batch.segments)
        return layer.output(attended.flatten(1))


def _rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square norm (Zhang, Sennrich, arXiv 1910.07467) in float32."""
    normed = F.rms_norm(hidden.float(), (hidden.shape[-1],), eps=eps)
    return weight * normed.to(hidden.dtype)


def _rotary_table(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and signed sin of every position, [max_position_embeddings, 1, head_dim] (Su et al., arXiv 2104.09864).

    The first half of the sines is negative: that is the sign a rotation gives the second half of a head.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)[:, None, :]
    cos, sin = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def _rotate(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding by halves. `x` [num_tokens, heads, head_dim]; the others [num_tokens, 1, head_dim]."""
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * signed_sin
