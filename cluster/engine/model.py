"""A lean decoder of the Llama kind (Touvron et al., arXiv 2302.13971) over a paged KV cache.

One forward pass takes a packed batch: no padding, no attention mask over sequences. Shapes are
[num_tokens, ...] throughout.
"""

from __future__ import annotations

import torch

from cluster.engine.batch import Batch
from cluster.engine.kv_cache import KVCache
from cluster.engine.model_config import ModelConfig
from cluster.engine.ops import Ops
from cluster.engine.weights import ModelWeights


class Decoder:
    """The model. Holds weights only; the state of sequences is in the KV cache it is given."""

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, ops: Ops, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.is_invariant = ops.is_invariant
        self.num_bytes_read = weights.num_bytes_read
        self._weights = weights
        self._ops = ops

    @torch.inference_mode()
    def forward(self, batch: Batch, kv_cache: KVCache) -> torch.Tensor:
        """Writes the KV of every row of `batch`.

        Returns the logits of its logit rows, float32 [num_logit_rows, vocab_size].
        """
        return self._ops.decode(self._weights, batch, kv_cache)
