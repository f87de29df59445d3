"""The operators on a CPU with AVX-512, through kernels of our own (`kernels/`).

Activations stay in float32 whatever the dtype of weights and KV: such a CPU computes in float32 anyway, and
rounding in between would only cost. A row's result does not depend on the other rows of the step.
"""

from __future__ import annotations

import enum

import torch

from cluster.engine.batch import Batch
from cluster.engine.kv_cache import KVCache
from cluster.engine.linear import Linear
from cluster.engine.model_config import ModelConfig
from cluster.engine.quantization import QuantizedWeight
from cluster.engine.rope import rotary_table
from cluster.engine.weights import ModelWeights

try:
    from cluster.engine import _kernels
except ImportError:  # no C compiler when the package was installed
    _kernels = None  # type: ignore[assignment]

_PANEL = 64  # outputs whose weights lie together, as in kernels.h
_LANES = 16


def has_kernels() -> bool:
    """Whether the kernels were built and run on this processor."""
    return _kernels is not None and _kernels.is_supported()


class CpuOps:
    is_invariant = True

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._config = config
        self._is_bfloat16 = int(dtype == torch.bfloat16)
        self._cos, self._sin = (table.contiguous() for table in rotary_table(config))
        self._model: _Model | None = None

    @staticmethod
    def supports(config: ModelConfig, dtype: torch.dtype) -> bool:
        return has_kernels() and dtype in (torch.float32, torch.bfloat16) and config.head_dim % _LANES == 0

    def make_linear(self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None = None) -> Linear:
        return KernelLinear(weight, bias)

    def make_norm_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.float().contiguous()

    def decode(self, weights: ModelWeights, batch: Batch, kv_cache: KVCache) -> torch.Tensor:
        model = self._model
        if model is None or model.weights is not weights or model.kv_cache is not kv_cache:
            model = self._model = _Model(self._config, weights, kv_cache, self._cos, self._sin, self._is_bfloat16)
        num_rows, num_logit_rows = len(batch.token_ids), len(batch.logit_rows)
        logits = torch.empty(num_logit_rows, self._config.vocab_size)
        scratch = torch.empty(num_rows, model.scratch_size)
        num_segments, table_len = batch.block_tables.shape
        _kernels.decode(
            model.address,
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
            self._config.rms_norm_eps,
        )
        return logits


class _Model:
    """Where everything is that does not change from step to step: a Model of kernels.h, as a table of numbers."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        kv_cache: KVCache,
        cos: torch.Tensor,
        sin: torch.Tensor,
        is_bfloat16: int,
    ) -> None:
        self.weights = weights
        self.kv_cache = kv_cache
        rows = [
            [
                layer.input_norm.data_ptr(),
                layer.post_attention_norm.data_ptr(),
                0 if layer.qk_norm is None else layer.qk_norm.data_ptr(),
                *(number for linear in layer.linears for number in _weight_of(linear)),
                kv_cache.keys[index].data_ptr(),
                kv_cache.values[index].data_ptr(),
                config.attention_span(index),
            ]
            for index, layer in enumerate(weights.layers)
        ]
        self._layers = torch.tensor(rows, dtype=torch.int64)
        shape = (config.hidden_size, config.intermediate_size, config.num_heads, config.num_kv_heads, config.head_dim)
        self._table = torch.tensor(
            [
                self._layers.data_ptr(),
                weights.embedding.data_ptr(),
                cos.data_ptr(),
                sin.data_ptr(),
                weights.norm.data_ptr(),
                *_weight_of(weights.head),
                len(weights.layers),
                *shape,
                kv_cache.block_size,
                is_bfloat16,
            ]
        )
        self.address = self._table.data_ptr()
        self.scratch_size = _kernels.scratch_size(self.address)


def _weight_of(linear: Linear) -> list[int]:
    assert isinstance(linear, KernelLinear)
    return linear.weight


class _Format(enum.IntEnum):
    """As in kernels.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3


class KernelLinear:
    """Float32 rows times a weight, which is laid out once in the order it is read (`kernels/linear.c`).

    `weight` is a Weight of kernels.h, as numbers; it holds as long as this object lives.
    """

    def __init__(self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None = None) -> None:
        if isinstance(weight, QuantizedWeight):
            weight_format = _Format.INT8 if weight.bits == 8 else _Format.INT4
            values, group_size = weight.values, weight.group_size
            self._scales = _lay_out(weight.scales, _Format.FLOAT32)
        else:
            weight_format = _Format.FLOAT32 if weight.dtype == torch.float32 else _Format.BFLOAT16
            values, group_size = weight, weight.shape[1]
            self._scales = torch.empty(0)
        self._bias = None if bias is None else bias.float()
        self._panels = _lay_out(values, weight_format)
        self.num_bytes = self._panels.nbytes + self._scales.nbytes
        self._out_features, in_features = values.shape
        self.weight = [
            self._panels.data_ptr(),
            self._scales.data_ptr(),
            0 if self._bias is None else self._bias.data_ptr(),
            in_features,
            self._out_features,
            group_size,
            weight_format,
        ]
        self._table = torch.tensor(self.weight, dtype=torch.int64)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.float32
        x = x.contiguous()
        y = x.new_empty(x.shape[0], self._out_features)
        _kernels.linear(x.data_ptr(), self._table.data_ptr(), y.data_ptr(), x.shape[0], torch.get_num_threads())
        return y


def _lay_out(weight: torch.Tensor, weight_format: _Format) -> torch.Tensor:
    """[out_features, n] → [panels, n, 64] in the order that linear.c describes, with zeros in the last panel."""
    out_features, n = weight.shape
    num_whole, num_panels = out_features // _PANEL, -(-out_features // _PANEL)
    if weight_format is _Format.INT4:
        panels = weight.new_empty(num_panels, n // 2, _PANEL, dtype=torch.uint8)
    else:
        panels = weight.new_empty(num_panels, n, _PANEL)
    _fill(panels[:num_whole], weight[: num_whole * _PANEL], weight_format)
    if num_whole < num_panels:  # a padded copy of the last panel only, not of the whole weight
        last = weight.new_zeros(_PANEL, n)
        last[: out_features - num_whole * _PANEL] = weight[num_whole * _PANEL :]
        _fill(panels[num_whole:], last, weight_format)
    return panels


def _fill(panels: torch.Tensor, weight: torch.Tensor, weight_format: _Format) -> None:
    """`panels` from `weight` [64 * panels, n]."""
    num_panels, n = len(panels), weight.shape[1]
    if weight_format is _Format.BFLOAT16:
        halves = weight.reshape(num_panels, 2, 2, _LANES, n)
        panels.view(num_panels, n, 2, _LANES, 2).copy_(halves.permute(0, 4, 1, 3, 2))
    elif weight_format is _Format.INT4:
        assert n % 2 == 0
        nibbles = (weight & 0xF).view(torch.uint8).view(num_panels, 4, _LANES, n // 2, 2)
        # [panels, pairs of inputs, lane, input of the pair, quarter of the panel], two quarters a byte
        nibbles = nibbles.permute(0, 3, 2, 4, 1)
        bytes_ = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
        panels.view(num_panels, n // 2, _LANES, 2, 2).copy_(bytes_)
    else:
        panels.copy_(weight.reshape(num_panels, _PANEL, n).transpose(1, 2))
