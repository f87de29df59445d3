"""The operators on a CPU with AVX-512, through kernels of our own (`kernels/`).

Activations stay in float32 whatever the dtype of weights and KV: such a CPU computes in float32 anyway, and
rounding in between would only cost. A row's result does not depend on the other rows of the step.
"""

from __future__ import annotations

import torch

from cluster.engine.batch import Batch
from cluster.engine.kv_cache import KVCache
from cluster.engine.linear import Linear
from cluster.engine.model_config import ModelConfig
from cluster.engine.rope import rotary_table

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
    activation_dtype = torch.float32

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._config = config
        self._is_bfloat16 = int(dtype == torch.bfloat16)
        self._cos, self._sin = (table.contiguous() for table in rotary_table(config))

    @staticmethod
    def supports(config: ModelConfig, dtype: torch.dtype) -> bool:
        return has_kernels() and dtype in (torch.float32, torch.bfloat16) and config.head_dim % _LANES == 0

    def make_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        return KernelLinear(weight, bias)

    def make_norm_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.float().contiguous()

    def add_rms_norm(self, hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        normed = torch.empty_like(hidden)
        num_rows, size = hidden.shape
        _kernels.add_rms_norm(
            hidden.data_ptr(),
            0 if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            normed.data_ptr(),
            num_rows,
            size,
            torch.get_num_threads(),
            self._config.rms_norm_eps,
        )
        return normed

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        product = gate_up.new_empty(num_rows, size)
        _kernels.silu_and_mul(gate_up.data_ptr(), product.data_ptr(), num_rows, size, torch.get_num_threads())
        return product

    def attention(
        self, qkv: torch.Tensor, layer: int, kv_cache: KVCache, batch: Batch, qk_norm: torch.Tensor | None = None
    ) -> torch.Tensor:
        config, num_threads = self._config, torch.get_num_threads()
        keys, values = kv_cache.keys[layer].data_ptr(), kv_cache.values[layer].data_ptr()
        num_segments, table_len = batch.block_tables.shape
        _kernels.rotate_and_store(
            qkv.data_ptr(),
            0 if qk_norm is None else qk_norm.data_ptr(),
            self._cos.data_ptr(),
            self._sin.data_ptr(),
            batch.positions.data_ptr(),
            batch.slots.data_ptr(),
            keys,
            values,
            len(qkv),
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            self._is_bfloat16,
            num_threads,
            config.rms_norm_eps,
        )
        attended = qkv.new_empty(len(qkv), config.q_size)
        _kernels.attention(
            qkv.data_ptr(),
            keys,
            values,
            attended.data_ptr(),
            batch.row_starts.data_ptr(),
            batch.context_lens.data_ptr(),
            batch.block_tables.data_ptr(),
            num_segments,
            table_len,
            kv_cache.block_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.attention_span(layer),
            self._is_bfloat16,
            num_threads,
        )
        return attended


class KernelLinear:
    """Float32 rows times a weight of either dtype, which is laid out once in the order it is read."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._out_features, self._in_features = weight.shape
        self._bias = None if bias is None else bias.float()
        self._is_bfloat16 = int(weight.dtype == torch.bfloat16)
        self._panels = _lay_out(weight)
        self._address = self._panels.data_ptr()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.float32
        x = x.contiguous()
        y = x.new_empty(x.shape[0], self._out_features)
        _kernels.linear(
            x.data_ptr(),
            self._address,
            y.data_ptr(),
            x.shape[0],
            self._in_features,
            self._out_features,
            self._is_bfloat16,
            torch.get_num_threads(),
        )
        return y if self._bias is None else y.add_(self._bias)


def _lay_out(weight: torch.Tensor) -> torch.Tensor:
    """[out_features, in_features] → [panels, in_features, 64].

    Float32 weights of one input lie in the order of their outputs. In bfloat16 outputs i and i + 16 of every 32 are
    neighbours: halves of one 32-bit word.
    """
    out_features, in_features = weight.shape
    num_whole = out_features // _PANEL
    panels = weight.new_empty(-(-out_features // _PANEL), in_features, _PANEL)
    _fill(panels[:num_whole], weight[: num_whole * _PANEL])
    if num_whole < len(panels):  # a padded copy of the last panel only, not of the whole weight
        last = weight.new_zeros(_PANEL, in_features)
        last[: out_features - num_whole * _PANEL] = weight[num_whole * _PANEL :]
        _fill(panels[num_whole:], last)
    return panels


def _fill(panels: torch.Tensor, weight: torch.Tensor) -> None:
    """`panels` [panels, in_features, 64] from `weight` [64 * panels, in_features]."""
    num_panels, in_features, _ = panels.shape
    if weight.dtype == torch.float32:
        panels.copy_(weight.reshape(num_panels, _PANEL, in_features).transpose(1, 2))
        return
    halves = weight.reshape(num_panels, _PANEL // (2 * _LANES), 2, _LANES, in_features)
    panels.view(num_panels, in_features, _PANEL // (2 * _LANES), _LANES, 2).copy_(halves.permute(0, 4, 1, 3, 2))
