"""How a model is computed on a GPU: PyTorch's operators in fixed shapes, recorded as CUDA graphs."""

from __future__ import annotations

import torch

from cluster.engine.batch import Batch
from cluster.engine.cuda_graphs import GraphRunner, StepShape
from cluster.engine.kv_cache import KVCache
from cluster.engine.model_config import ModelConfig
from cluster.engine.ops import TorchOps
from cluster.engine.padded_attention import PaddedLayout
from cluster.engine.weights import ModelWeights

# With a chunk of a prompt in the step all other segments would be padded to its length.
_MAX_SEGMENT_ROWS = 64


class FixedShapeOps(TorchOps):
    """`TorchOps` whose step reads nothing back to the host.

    Attention is one call a layer for all segments, but in steps that have a chunk of a prompt. On a GPU steps are
    recorded as graphs; without one the same operators run directly, which is how they are tested.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype, device)
        self._has_graphs = device.type == "cuda"
        self._graphs: GraphRunner | None = None
        self._layout: PaddedLayout | None = None
        self._masks: dict[int, torch.Tensor] = {}

    def decode(self, weights: ModelWeights, batch: Batch, kv_cache: KVCache) -> torch.Tensor:
        if batch.max_rows > _MAX_SEGMENT_ROWS:
            self._layout = None
            return super().decode(weights, batch, kv_cache)
        if self._has_graphs:
            if self._graphs is None:
                self._graphs = GraphRunner(
                    lambda padded, shape: self._compute(weights, padded, kv_cache, shape),
                    kv_cache.spare_block,
                    kv_cache.block_size,
                )
            logits = self._graphs.run(batch)
            if logits is not None:
                return logits
        return self._compute(weights, batch, kv_cache, StepShape.of(batch))

    def _compute(self, weights: ModelWeights, batch: Batch, kv_cache: KVCache, shape: StepShape) -> torch.Tensor:
        max_context = shape.num_table_blocks * kv_cache.block_size
        self._layout = PaddedLayout(batch, kv_cache.block_size, shape.max_rows, max_context)
        self._masks = {}
        return super().decode(weights, batch, kv_cache)

    def _attend(self, query: torch.Tensor, index: int, kv_cache: KVCache, batch: Batch) -> torch.Tensor:
        if self._layout is None:
            return super()._attend(query, index, kv_cache, batch)
        span = self._config.attention_span(index)
        if span not in self._masks:
            self._masks[span] = self._layout.mask(span)
        return self._layout.attend(query, kv_cache, index, self._masks[span])
