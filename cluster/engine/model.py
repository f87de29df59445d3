"""A lean decoder of the Llama kind (Touvron et al., arXiv 2302.13971) over a paged KV cache.

One forward pass takes a packed batch: no padding, no attention mask over sequences. Shapes are
[num_tokens, ...] throughout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from cluster.engine.batch import Batch
from cluster.engine.kv_cache import KVCache
from cluster.engine.linear import Linear
from cluster.engine.model_config import ModelConfig
from cluster.engine.ops import Ops


@dataclass(frozen=True, slots=True)
class LayerWeights:
    input_norm: torch.Tensor  # [hidden_size]
    qkv: Linear  # hidden_size → q_size + 2 * kv_size
    qk_norm: torch.Tensor | None  # [num_heads + num_kv_heads, head_dim]
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


class Decoder:
    """The model. Holds weights only; the state of sequences is in the KV cache it is given."""

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, ops: Ops, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.is_invariant = ops.is_invariant
        self._weights = weights
        self._ops = ops

    @property
    def num_bytes_read(self) -> int:
        """What a step reads of the weights, however many rows it has."""
        weights = self._weights
        linears = [
            linear for layer in weights.layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)
        ]
        return sum(linear.num_bytes for linear in (*linears, weights.head))

    @torch.inference_mode()
    def forward(self, batch: Batch, kv_cache: KVCache) -> torch.Tensor:
        """Writes the KV of every row of `batch`.

        Returns the logits of its logit rows, float32 [num_logit_rows, vocab_size].
        """
        ops, delta = self._ops, None
        hidden = F.embedding(batch.token_ids, self._weights.embedding).to(ops.activation_dtype)
        for index, layer in enumerate(self._weights.layers):
            normed = ops.add_rms_norm(hidden, delta, layer.input_norm)
            delta = layer.output(ops.attention(layer.qkv(normed), index, kv_cache, batch, layer.qk_norm))
            normed = ops.add_rms_norm(hidden, delta, layer.post_attention_norm)
            delta = layer.down(ops.silu_and_mul(layer.gate_up(normed)))
        last = hidden.index_select(0, batch.logit_rows)
        last_delta = None if delta is None else delta.index_select(0, batch.logit_rows)
        return self._weights.head(ops.add_rms_norm(last, last_delta, self._weights.norm)).float()
