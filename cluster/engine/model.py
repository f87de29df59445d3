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
from cluster.engine.layer import LayerWeights
from cluster.engine.linear import Linear
from cluster.engine.model_config import ModelConfig
from cluster.engine.ops import Ops


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
        linears = [linear for layer in weights.layers for linear in layer.linears]
        return sum(linear.num_bytes for linear in (*linears, weights.head))

    @torch.inference_mode()
    def forward(self, batch: Batch, kv_cache: KVCache) -> torch.Tensor:
        """Writes the KV of every row of `batch`.

        Returns the logits of its logit rows, float32 [num_logit_rows, vocab_size].
        """
        ops, weights = self._ops, self._weights
        embeddings = F.embedding(batch.token_ids, weights.embedding).to(ops.activation_dtype)
        hidden = ops.run_layers(embeddings, weights.layers, kv_cache, batch)
        return weights.head(ops.norm(hidden.index_select(0, batch.logit_rows), weights.norm)).float()
