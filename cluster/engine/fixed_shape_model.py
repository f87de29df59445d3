"""The decoder on a GPU: PyTorch's operators in fixed shapes, recorded as CUDA graphs."""

from __future__ import annotations

import importlib

import torch

from cluster.engine.attention import GatheredAttention
from cluster.engine.batch import Batch
from cluster.engine.cuda_graphs import GraphRunner, StepShape
from cluster.engine.kv_cache import KVCache
from cluster.engine.model import TorchModel
from cluster.engine.model_config import ModelConfig
from cluster.engine.padded_attention import PaddedAttention
from cluster.engine.weights import ModelWeights

# With a chunk of a prompt in the step all other segments would be padded to its length.
_MAX_SEGMENT_ROWS = 64


class FixedShapeModel(TorchModel):
    """`TorchModel` whose step reads nothing back to the host.

    Attention is one call a layer for all segments, but in steps that have a chunk of a prompt. On a GPU steps are
    recorded as graphs; without one the same operators run directly, which is how they are tested.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights, kv_cache: KVCache) -> None:
        super().__init__(config, weights, kv_cache)
        self._graphs: GraphRunner | None = None
        if self.device.type == "cuda":
            importlib.import_module("torch.nn.attention.bias")  # which attention asks for there: not in a timed step
            self._graphs = GraphRunner(self._padded_logits, kv_cache.spare_block, kv_cache.block_size)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        if batch.max_rows > _MAX_SEGMENT_ROWS:
            return self._logits(batch, GatheredAttention(batch, self._kv_cache.block_size))
        logits = None if self._graphs is None else self._graphs.run(batch)
        return self._padded_logits(batch, StepShape.of(batch)) if logits is None else logits

    def _padded_logits(self, batch: Batch, shape: StepShape) -> torch.Tensor:
        """`batch` is of `shape`, or smaller: only attention is padded then."""
        block_size = self._kv_cache.block_size
        attention = PaddedAttention(batch, block_size, shape.max_rows, shape.num_table_blocks * block_size)
        return self._logits(batch, attention)
