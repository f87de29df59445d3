"""Loads a Hugging Face folder, and prepares its weights for the form of the model that will use them."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from cluster.config.workers import Numerics
from cluster.engine.checkpoint import TensorReader
from cluster.engine.cpu_kernels import LANES, has_kernels, why_no_kernels
from cluster.engine.cpu_model import CpuModel
from cluster.engine.kv_cache import KVCache
from cluster.engine.linear import Linear
from cluster.engine.model import Model, TorchModel
from cluster.engine.model_config import ModelConfig
from cluster.engine.quantization import Quantization, QuantizedWeight, quantize
from cluster.engine.stored_weights import read_stored, stack_outputs, to_floats
from cluster.engine.weights import LayerWeights, ModelWeights, WeightFormat
from cluster.errors import ConfigurationError

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"Called with (parts read, all parts) while a model loads; embedding, head and every layer are a part each."

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with weights but without a KV cache: the size of the cache depends on the remaining memory."""

    config: ModelConfig
    weights: ModelWeights  # in the format of `form`
    form: type[Model]
    is_head: bool = False  # whether it drafts from hidden states: the inputs of its steps are given

    @property
    def records_steps(self) -> bool:
        """True if steps are recorded at start, which takes memory of the GPU."""
        return self.form.records_steps and not self.is_head and self.weights.device.type == "cuda"

    def bind(self, kv_cache: KVCache) -> Model:
        """Returns the model that computes in `kv_cache`."""
        return self.form(self.config, self.weights, kv_cache)


def resolve_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("device is 'cuda', but PyTorch finds no GPU")
    return torch.device(device)


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Returns the dtype; `auto` is bfloat16, but float32 on a CPU without the kernels.

    Steps of few rows wait for weights, so half the bytes are faster. PyTorch's operators multiply bfloat16 slowly, or
    not at all, on many processors.
    """
    if dtype != "auto":
        return _DTYPES[dtype]
    return torch.bfloat16 if device.type == "cuda" or has_kernels() else torch.float32


def load_model(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    *,
    quantization: Quantization | None = None,
    form: type[Model] | None = None,
    numerics: Numerics = "fast",
    ends: ModelWeights | None = None,
    rows: Sequence[int] | None = None,
    num_outputs: int | None = None,
) -> LoadedModel:
    """Reads `folder` (config.json, one or several .safetensors). Raises ConfigurationError if it is incomplete.

    `form`: by default the result of `form_on` for `numerics`. `ends`: weights of
    the same model on the same device; the result shares their embedding, last norm and head. `rows`: new order of
    the rows of embedding and head, in which token i is token `rows[i]` of the folder; None: the folder's order.
    `num_outputs`: number of tokens that need logits; None: all. A GPU ignores it and computes all logits, because the
    checkpoint's size suits the kernels of products.
    """
    config = ModelConfig.from_folder(folder)
    form = form or form_on(config, dtype, device, numerics)
    if device.type != "cpu":
        num_outputs = None
    elif form is TorchModel:
        size = f"A head size of {config.head_dim} is no multiple of {LANES}, which the kernels need"
        _warn_of_operators(why_no_kernels() or size)
    reader = WeightReader(
        config, TensorReader(folder, dtype, device), form.weight_format, quantization, rows, num_outputs
    )
    weights = reader.read(progress or (lambda done, total: None), ends)
    if rows is not None:
        config = config.with_rows(rows)
    if num_outputs is not None:
        config = replace(config, vocab_size=num_outputs)
    return LoadedModel(config, weights, form)


def form_on(config: ModelConfig, dtype: torch.dtype, device: torch.device, numerics: Numerics = "fast") -> type[Model]:
    """Returns the fastest form that supports the model on `device`; `TorchModel` supports every model.

    For `numerics` "invariant", returns an invariant form if there is one.
    """
    if device.type == "cpu" and CpuModel.supports(config, dtype):
        return CpuModel
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        # PyTorch's builds for CPUs come without Triton.
        from cluster.engine.triton_model import InvariantTritonModel, TritonModel

        if TritonModel.supports(config, dtype):
            return InvariantTritonModel if numerics == "invariant" else TritonModel
    return TorchModel


@cache
def _warn_of_operators(reason: str) -> None:
    """Logs once for each reason that PyTorch's operators run on this CPU."""
    logger.warning(
        "PyTorch's operators compute on this CPU: steps take several times as long as with Outrider's kernels, and "
        "near-ties may fall either way. %s",
        reason,
    )


def form_like(form: type[Model], config: ModelConfig, dtype: torch.dtype) -> type[Model]:
    """Returns `form` if it supports the model, otherwise `TorchModel`."""
    return form if form.supports(config, dtype) else TorchModel


class WeightReader:
    """Reads weights by their names in the supported families, and prepares each weight as soon as it is read."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: TensorReader,
        weight_format: WeightFormat,
        quantization: Quantization | None,
        rows: Sequence[int] | None = None,
        num_outputs: int | None = None,
    ) -> None:
        self._config = config
        self._tensors = tensors
        self._format = weight_format
        self._quantization = quantization
        self._rows = rows
        self._num_outputs = num_outputs

    def read(self, progress: Progress, ends: ModelWeights | None = None) -> ModelWeights:
        """Returns the model's weights. With `ends`, all except those of the layers are shared with `ends`."""
        num_parts = 1 + self._config.num_layers + 1
        embedding = self._embedding() if ends is None else ends.embedding
        progress(1, num_parts)
        layers = []
        for index in range(self._config.num_layers):
            layer = f"model.layers.{index}"
            layers.append(self.layer(layer, self.norm(f"{layer}.input_layernorm"), self._config.hidden_size))
            progress(1 + len(layers), num_parts)
        norm = self.norm("model.norm") if ends is None else ends.norm
        head = self._head(embedding) if ends is None else ends.head
        if ends is None and self._config.embedding_scale != 1:
            embedding = embedding * torch.tensor(self._config.embedding_scale, dtype=embedding.dtype)
        progress(num_parts, num_parts)
        return ModelWeights(embedding, tuple(layers), norm, head)

    def _embedding(self) -> torch.Tensor:
        return self.by_token("model.embed_tokens.weight")

    def by_token(self, name: str) -> torch.Tensor:
        """Returns a weight that has a row for each token."""
        weight = self._tensors.read([(name, self._config.vocab_size)], self._config.hidden_size)
        return weight if self._rows is None else weight[torch.tensor(self._rows, device=weight.device)]

    def _head(self, embedding: torch.Tensor) -> Linear:
        """Returns the head, which is never quantized."""
        weight = embedding if self._config.tie_word_embeddings else self.by_token("lm_head.weight")
        return self._format.make_linear(weight[: self._num_outputs])

    def layer(self, layer: str, input_norm: torch.Tensor | None, attention_inputs: int) -> LayerWeights:
        """Returns the layer whose weights' names begin with `layer`; `attention_inputs`: in_features of its qkv."""
        config, hidden, intermediate = self._config, self._config.hidden_size, self._config.intermediate_size
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        qkv = [(f"{attention}.{name}_proj", size) for name, size in zip("qkv", config.qkv_sizes, strict=True)]
        gate_up = [(f"{mlp}.{name}_proj", intermediate) for name in ("gate", "up")]
        if config.has_fused_projections:
            qkv, gate_up = (
                [(f"{attention}.qkv_proj", sum(config.qkv_sizes))],
                [(f"{mlp}.gate_up_proj", 2 * intermediate)],
            )
        before_mlp, output_norm, down_norm = f"{layer}.post_attention_layernorm", None, None
        if config.has_norms_after:
            before_mlp, output_norm = f"{layer}.pre_feedforward_layernorm", self.norm(before_mlp)
            down_norm = self.norm(f"{layer}.post_feedforward_layernorm")
        return LayerWeights(
            input_norm=input_norm,
            qkv=self.linear(
                *qkv, in_features=attention_inputs, has_bias=config.has_qkv_bias, order=self._order_of_heads()
            ),
            qk_norm=self._qk_norm(attention),
            output=self.linear(
                (f"{attention}.o_proj", hidden), in_features=config.q_size, has_bias=config.has_output_bias
            ),
            post_attention_norm=self.norm(before_mlp),
            gate_up=self.linear(*gate_up, in_features=hidden, has_bias=config.has_mlp_bias),
            down=self.linear((f"{mlp}.down_proj", hidden), in_features=intermediate, has_bias=config.has_mlp_bias),
            output_norm=output_norm,
            down_norm=down_norm,
        )

    def _order_of_heads(self) -> torch.Tensor | None:
        """Returns the order of qkv's outputs in which the kernels rotate them; None: that of the checkpoint.

        A kernel rotates dimension i of a head with dimension i + head_dim / 2. Where only the first r are rotated, i
        with i + r / 2, these are moved to the beginnings of the halves. Products of queries and keys stay the same.
        """
        order = self._order_of_dims()
        if order is None:
            return None
        num_rotated = self._config.num_heads + self._config.num_kv_heads
        starts = torch.arange(0, num_rotated * len(order), len(order))[:, None]
        values = torch.arange(num_rotated * len(order), sum(self._config.qkv_sizes))
        return torch.cat([(starts + order).flatten(), values])

    def _order_of_dims(self) -> torch.Tensor | None:
        size, num_rotated = self._config.head_dim, self._config.rope.num_rotated(self._config.head_dim)
        if num_rotated == size:
            return None
        half = num_rotated // 2
        first, second, others = torch.split(torch.arange(size), [half, half, size - num_rotated])
        early, late = others.chunk(2)
        return torch.cat([first, early, second, late])

    def linear(
        self, *parts: tuple[str, int], in_features: int, has_bias: bool, order: torch.Tensor | None = None
    ) -> Linear:
        """Returns a single product for several projections of the same input; their weights are stacked by rows.

        `order`: of the rows, which the checkpoint has in another order; None: it has the same.
        """
        stored = self._config.stored_format
        weight: torch.Tensor | QuantizedWeight
        if stored is None:
            weight = self._tensors.read([(f"{name}.weight", out) for name, out in parts], in_features)
        else:
            weight = stack_outputs([read_stored(stored, self._tensors, name, out, in_features) for name, out in parts])
        bias = self._tensors.read([(f"{name}.bias", out) for name, out in parts]) if has_bias else None
        if order is not None:
            weight, bias = weight[order], None if bias is None else bias[order]
        if self._quantization is not None:
            weight = quantize(to_floats(weight), self._quantization)
        return self._format.make_linear(weight, bias)

    def norm(self, name: str, size: int | None = None) -> torch.Tensor:
        """Returns the weight of a norm over `size` values; None: `hidden_size`."""
        return self._norm_weight(self._tensors.read([(f"{name}.weight", size or self._config.hidden_size)]))

    def _norm_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return self._format.make_norm_weight(1.0 + weight.float() if self._config.has_unit_norms else weight)

    def _qk_norm(self, attention: str) -> torch.Tensor | None:
        config = self._config
        if not config.has_qk_norm:
            return None
        query, key = (
            self._tensors.read([(f"{attention}.{name}.weight", config.head_dim)]) for name in ("q_norm", "k_norm")
        )
        weight = self._norm_weight(torch.cat([query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)]))
        if config.query_scale != 1:
            weight[: config.num_heads] *= config.query_scale
        order = self._order_of_dims()
        return weight if order is None else weight[:, order].contiguous()
