"""The decoder on a GPU with kernels of our own: no padding, no copied contexts, few graphs, few kernels per layer."""

from __future__ import annotations

import logging
from typing import ClassVar

import torch
import torch.nn.functional as F

from cluster.engine.batch import Batch, Segment, pack
from cluster.engine.gpu_kernels.gate import gated
from cluster.engine.gpu_kernels.norm import add_and_norm
from cluster.engine.gpu_kernels.paged_attention import PagedAttention
from cluster.engine.gpu_kernels.rotation import rotate_and_write
from cluster.engine.gpu_kernels.tiles import SPLIT, TILE
from cluster.engine.graph_memory import graph_sizes
from cluster.engine.kv_cache import KVCache
from cluster.engine.model import LayerInputs, Model
from cluster.engine.model_config import AFTER_NORM, ModelConfig
from cluster.engine.rope import rotary_table
from cluster.engine.step_graphs import CudaRecorder, Recorder, StepGraphs
from cluster.engine.triton_linear import FixedOrderWeightFormat, GpuWeightFormat
from cluster.engine.weights import ModelWeights, WeightFormat

logger = logging.getLogger(__name__)


class TritonModel(Model):
    """The decoder in Triton kernels. Its steps copy nothing to the host.

    Steps of chains replay the graphs that `prepare` recorded. cuBLAS computes the products of unquantized weights, and
    chooses a kernel by the number of rows. All other kernels give a row the same bits in every batch. In
    `InvariantTritonModel` all products do, too.
    """

    weight_format: ClassVar[WeightFormat] = GpuWeightFormat()
    is_invariant = False
    records_steps = True

    @classmethod
    def supports(cls, config: ModelConfig, dtype: torch.dtype) -> bool:
        """Returns True if the attention kernel supports the model."""
        return config.num_heads // config.num_kv_heads <= TILE

    def __init__(self, config: ModelConfig, weights: ModelWeights, kv_cache: KVCache) -> None:
        """`config` must be supported (see `supports`)."""
        super().__init__(config, weights, kv_cache)
        self._angles = {config.rope_of(layer): self._table(layer) for layer in range(config.num_layers)}
        self._graphs: StepGraphs | None = None
        self.recorder: Recorder | None = None
        "The recorder of the steps, whose memory others may share; None before."

    def _table(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        cosines, sines = rotary_table(self.config, layer)
        return cosines.to(self.device, self.dtype), sines.to(self.device, self.dtype)

    @property
    def block_size(self) -> int:
        return self._kv_cache.block_size

    @property
    def spare_slot(self) -> int:
        """A slot that no sequence uses."""
        return self._kv_cache.spare_block * self._kv_cache.block_size

    def prepare(self, max_rows: int, max_context: int) -> None:
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                self.warm_up()
                free, _ = torch.cuda.mem_get_info()
                self.record(max_rows, max_context, CudaRecorder())
                left, _ = torch.cuda.mem_get_info()
            logger.info("CUDA graphs: %.2f GB", (free - left) / 1e9)

    def warm_up(self) -> None:
        """Compiles attention for steps that are not recorded: chains and trees, over one split and over several.

        Their output goes to the spare block.
        """
        for context_len in (2, SPLIT + 2):
            if context_len > self.config.max_position_embeddings:
                continue
            table = [self._kv_cache.spare_block] * -(-context_len // self.block_size)
            for parents in (None, [-1, 0]):
                segment = Segment([0, 0], context_len - 2, table, 1, parents)
                self.forward(pack([segment], self.block_size, self.device))

    @torch.inference_mode()
    def record(self, max_rows: int, max_context: int, record: Recorder) -> None:
        """Records steps of up to `max_rows` rows over contexts of up to `max_context` tokens."""
        self.recorder = record
        self._graphs = StepGraphs(
            self.compute,
            graph_sizes(max_rows),
            -(-max_context // self.block_size),
            self.spare_slot,
            self.config.vocab_size,
            self.device,
            record,
        )

    @torch.inference_mode()
    def forward(self, batch: Batch, inputs: LayerInputs | None = None) -> torch.Tensor:
        if inputs is not None:
            return self.compute(batch, inputs)
        logits = None if self._graphs is None else self._graphs.run(batch)
        return self.compute(batch) if logits is None else logits

    def compute(self, batch: Batch, inputs: LayerInputs | None = None) -> torch.Tensor:
        """Computes a step without recorded graphs. `record` records this method."""
        weights, kv_cache, eps = self._weights, self._kv_cache, self.config.rms_norm_eps
        attention = PagedAttention(batch, self.block_size, batch.block_tables.shape[1] * self.block_size)
        hidden = F.embedding(batch.token_ids, weights.embedding) if inputs is None else inputs.residual
        addend = None
        for index, layer in enumerate(weights.layers):
            keys, values = kv_cache.keys[index], kv_cache.values[index]
            if inputs is not None and index == 0:
                normed = inputs.attention
            else:
                assert layer.input_norm is not None
                hidden, normed = add_and_norm(hidden, addend, layer.input_norm, eps)
            self._capture(index, hidden, batch)
            angles = self._angles[self.config.rope_of(index)]
            query = rotate_and_write(layer.qkv(normed), layer.qk_norm, angles, batch, keys, values, eps)
            attended = attention.attend(query, keys, values, self.config.attention_span(index))
            addend = self._normed(layer.output(attended.flatten(1)), layer.output_norm)
            hidden, normed = add_and_norm(hidden, addend, layer.post_attention_norm, eps)
            activated = gated(layer.gate_up(normed), has_gelu=self.config.has_gelu)
            addend = self._normed(layer.down(activated), layer.down_norm)
        rows, captures_end = batch.logit_rows, self.config.captures_end
        if not captures_end:
            hidden, addend = hidden[rows], None if addend is None else addend[rows]
        if weights.norm is None:
            hidden = normed = hidden if addend is None else hidden + addend
        else:
            hidden, normed = add_and_norm(hidden, addend, weights.norm, eps)
        if captures_end:
            self._capture(len(weights.layers), hidden, batch)
            self._capture(AFTER_NORM, normed, batch)
            normed = normed[rows]
        return weights.head(normed).float()

    def _normed(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return x if weight is None else add_and_norm(x, None, weight, self.config.rms_norm_eps)[1]


class InvariantTritonModel(TritonModel):
    """`TritonModel` for `numerics: invariant`: a row has the same bits in any batch, recorded or not.

    All products have a fixed order of sums.
    """

    weight_format = FixedOrderWeightFormat()
    is_invariant = True
