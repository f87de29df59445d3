"""The decoder on a CPU: a forward pass is one call of the kernels (`kernels/decoder.c`).

The kernels compute the same operations as `TorchModel`, in the same order. Activations stay in float32 for any dtype of
weights and KV, because rounding them would only cost time. Only products with bfloat16 instructions round their inputs.
A row's result does not depend on the other rows of the step.
"""

from __future__ import annotations

import torch

from cluster.engine.batch import Batch
from cluster.engine.cpu_kernels import LANES, has_kernels, kernels
from cluster.engine.cpu_linear import KernelLinear, KernelWeightFormat
from cluster.engine.kv_cache import KVCache
from cluster.engine.linear import Linear
from cluster.engine.model import LayerInputs, Model
from cluster.engine.model_config import ModelConfig
from cluster.engine.rope import rotary_table
from cluster.engine.weights import LayerWeights, ModelWeights


class CpuModel(Model):
    """A decoder that passes a Model of kernels.h to the kernels: a table with the addresses of weights and cache."""

    weight_format = KernelWeightFormat()
    is_invariant = True
    activations = torch.float32

    def __init__(self, config: ModelConfig, weights: ModelWeights, kv_cache: KVCache) -> None:
        super().__init__(config, weights, kv_cache)
        self._angles = [rotary_table(config, layer) for layer in range(config.num_layers)]
        self._layers = torch.tensor(
            [self._layer_row(index, layer) for index, layer in enumerate(weights.layers)], dtype=torch.int64
        )
        self._captured_layers = torch.tensor(config.captured_layers, dtype=torch.int64)
        self._table = torch.tensor(self._model_row(), dtype=torch.int64)
        self._address = self._table.data_ptr()
        self._scratch_size = kernels.scratch_size(self._address)

    @classmethod
    def supports(cls, config: ModelConfig, dtype: torch.dtype) -> bool:
        return has_kernels() and dtype in (torch.float32, torch.bfloat16) and config.head_dim % LANES == 0

    @torch.inference_mode()
    def forward(self, batch: Batch, inputs: LayerInputs | None = None) -> torch.Tensor:
        num_rows, num_logit_rows = len(batch.token_ids), len(batch.logit_rows)
        logits = torch.empty(num_logit_rows, self.config.vocab_size)
        scratch = torch.empty(num_rows, self._scratch_size)
        num_segments, table_len = batch.block_tables.shape
        kernels.decode(
            self._address,
            logits.data_ptr(),
            scratch.data_ptr(),
            batch.token_ids.data_ptr(),
            batch.logit_rows.data_ptr(),
            batch.positions.data_ptr(),
            batch.slots.data_ptr(),
            batch.row_starts.data_ptr(),
            batch.prefix_lens.data_ptr(),
            batch.block_tables.data_ptr(),
            0 if batch.paths is None else batch.paths.data_ptr(),
            num_rows,
            num_logit_rows,
            num_segments,
            table_len,
            0 if batch.paths is None else batch.paths.shape[1],
            torch.get_num_threads(),
            *((0, 0) if inputs is None else (inputs.residual.data_ptr(), inputs.attention.data_ptr())),
            self.config.rms_norm_eps,
        )
        return logits

    def _layer_row(self, index: int, layer: LayerWeights) -> list[int]:
        """Returns the fields of a Layer of kernels.h."""
        return [
            0 if layer.input_norm is None else layer.input_norm.data_ptr(),
            layer.post_attention_norm.data_ptr(),
            *(0 if norm is None else norm.data_ptr() for norm in (layer.output_norm, layer.down_norm, layer.qk_norm)),
            *(table.data_ptr() for table in self._angles[index]),
            *(number for linear in layer.linears for number in _weight_of(linear)),
            self._kv_cache.keys[index].data_ptr(),
            self._kv_cache.values[index].data_ptr(),
            self.config.attention_span(index),
        ]

    def _model_row(self) -> list[int]:
        """Returns the fields of a Model of kernels.h."""
        config, weights, states = self.config, self._weights, self._kv_cache.states
        return [
            self._layers.data_ptr(),
            weights.embedding.data_ptr(),
            0 if weights.norm is None else weights.norm.data_ptr(),
            *_weight_of(weights.head),
            0 if states is None else states.data_ptr(),
            self._captured_layers.data_ptr(),
            len(self._captured_layers),
            len(weights.layers),
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            self._kv_cache.block_size,
            int(self.dtype == torch.bfloat16),
            int(config.has_gelu),
        ]


def _weight_of(linear: Linear) -> list[int]:
    assert isinstance(linear, KernelLinear)
    return linear.weight
