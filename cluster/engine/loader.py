"""Loads a Hugging Face folder into the engine's model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from cluster.config import LayerChoice
from cluster.engine.cpu_ops import CpuOps
from cluster.engine.fixed_shape_ops import FixedShapeOps
from cluster.engine.linear import Linear
from cluster.engine.model import Decoder
from cluster.engine.model_config import ModelConfig
from cluster.engine.ops import Ops, TorchOps
from cluster.engine.quantization import Quantization, quantize
from cluster.engine.weights import LayerWeights, ModelWeights
from cluster.errors import ConfigurationError

Progress = Callable[[int, int], None]
"""Told (parts read, parts in all) while a model loads; embedding, head and every layer are a part."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("device 'cuda' was asked for, but PyTorch sees no GPU")
    return torch.device(device)


def resolve_dtype(dtype: str, device: torch.device, *, on_cpu: torch.dtype) -> torch.dtype:
    """`auto` is bfloat16 on GPU and `on_cpu` on CPU."""
    if dtype != "auto":
        return _DTYPES[dtype]
    return torch.bfloat16 if device.type == "cuda" else on_cpu


def load_model(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    *,
    layers: LayerChoice | None = None,
    quantization: Quantization | None = None,
    ops: Ops | None = None,
) -> Decoder:
    """Reads `folder` (config.json, one or several .safetensors). Raises ConfigurationError when it is incomplete.

    `layers` leaves the other layers out; `ops` are the operators to run it with, the fastest on its device unless
    given.
    """
    config = ModelConfig.from_folder(folder)
    chosen = range(config.num_layers) if layers is None else choose_layers(layers, config.num_layers)
    ops = ops or make_ops(config.with_layers(chosen), dtype, device)
    reader = _TensorReader(folder, dtype, device)
    weights = _read_weights(config, ops, reader, chosen, quantization, progress or (lambda done, total: None))
    return Decoder(config.with_layers(chosen), weights, ops, dtype, device)


def make_ops(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Ops:
    """The fastest operators for the model on its device."""
    if device.type == "cpu" and CpuOps.supports(config, dtype):
        return CpuOps(config, dtype)
    if device.type == "cuda":
        return FixedShapeOps(config, dtype, device)
    return TorchOps(config, dtype, device)


def choose_layers(choice: LayerChoice, num_layers: int) -> Sequence[int]:
    """Indices of the layers that `choice` keeps of `num_layers`. Raises ConfigurationError when one does not exist."""
    if choice == "even":
        return range(0, num_layers, 2)
    if choice == "last-half":
        return range(num_layers // 2, num_layers)
    missing = [index for index in choice if index >= num_layers]
    if missing or list(choice) != sorted(set(choice)):
        raise ConfigurationError(f"layers {list(choice)}: name some of 0 to {num_layers - 1}, in order")
    return choice


def _read_weights(
    config: ModelConfig,
    ops: Ops,
    tensors: _TensorReader,
    layers: Sequence[int],
    quantization: Quantization | None,
    progress: Progress,
) -> ModelWeights:
    hidden, intermediate = config.hidden_size, config.intermediate_size

    def linear(*parts: tuple[str, int], in_features: int, has_bias: bool = False) -> Linear:
        """One product for several projections of the same input, fused by stacking their rows."""
        weight = tensors.read([(f"{name}.weight", out) for name, out in parts], in_features)
        bias = tensors.read([(f"{name}.bias", out) for name, out in parts]) if has_bias else None
        return ops.make_linear(weight if quantization is None else quantize(weight, quantization), bias)

    def norm(name: str) -> torch.Tensor:
        return ops.make_norm_weight(tensors.read([(f"{name}.weight", hidden)]))

    def qk_norm(attention: str) -> torch.Tensor | None:
        if not config.has_qk_norm:
            return None
        query, key = (tensors.read([(f"{attention}.{name}.weight", config.head_dim)]) for name in ("q_norm", "k_norm"))
        return ops.make_norm_weight(
            torch.cat([query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)])
        )

    def layer(index: int) -> LayerWeights:
        attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
        return LayerWeights(
            input_norm=norm(f"model.layers.{index}.input_layernorm"),
            qkv=linear(
                (f"{attention}.q_proj", config.q_size),
                (f"{attention}.k_proj", config.kv_size),
                (f"{attention}.v_proj", config.kv_size),
                in_features=hidden,
                has_bias=config.has_qkv_bias,
            ),
            qk_norm=qk_norm(attention),
            output=linear((f"{attention}.o_proj", hidden), in_features=config.q_size, has_bias=config.has_output_bias),
            post_attention_norm=norm(f"model.layers.{index}.post_attention_layernorm"),
            gate_up=linear(
                (f"{mlp}.gate_proj", intermediate),
                (f"{mlp}.up_proj", intermediate),
                in_features=hidden,
                has_bias=config.has_mlp_bias,
            ),
            down=linear((f"{mlp}.down_proj", hidden), in_features=intermediate, has_bias=config.has_mlp_bias),
        )

    embedding = tensors.read([("model.embed_tokens.weight", config.vocab_size)], hidden)
    num_parts = 1 + len(layers) + 1
    progress(1, num_parts)
    read_layers = []
    for index in layers:
        read_layers.append(layer(index))
        progress(1 + len(read_layers), num_parts)
    head = (
        ops.make_linear(embedding)
        if config.tie_word_embeddings
        else ops.make_linear(tensors.read([("lm_head.weight", config.vocab_size)], hidden))
    )
    progress(num_parts, num_parts)
    return ModelWeights(embedding, tuple(read_layers), norm("model.norm"), head)


class _TensorReader:
    """Reads tensors by name from the memory-mapped shards of a folder."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._folder, self._dtype, self._device = folder, dtype, device
        self._shards: dict[str, Any] = {}
        self._file_of = _weight_map(folder)

    def read(self, parts: Sequence[tuple[str, int]], *inner: int) -> torch.Tensor:
        """The tensors `parts` (name, rows), [rows, *inner] each, one below the other.

        They are copied out of the map once, converted on the way: what is returned does not hold on to the files.
        """
        sizes = [rows for _, rows in parts]
        stacked = torch.empty(sum(sizes), *inner, dtype=self._dtype, device=self._device)
        for (name, rows), place in zip(parts, torch.split(stacked, sizes), strict=True):
            place.copy_(self._mapped(name, rows, *inner))
        return stacked

    def _mapped(self, name: str, *shape: int) -> torch.Tensor:
        file = self._file_of.get(name)
        if file is None:
            raise ConfigurationError(f"{self._folder} has no weight named {name!r}")
        if file not in self._shards:
            self._shards[file] = _open_shard(self._folder / file)
        tensor: torch.Tensor = self._shards[file].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ConfigurationError(
                f"{self._folder}: {name!r} has shape {tuple(tensor.shape)}, config.json implies {shape}"
            )
        return tensor


def _weight_map(folder: Path) -> dict[str, str]:
    """Which file holds each tensor."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (OSError, ValueError, KeyError) as error:
            raise ConfigurationError(f"cannot read {index}: {error}") from error
        return weight_map
    single = folder / "model.safetensors"
    if not single.is_file():
        raise ConfigurationError(f"{folder} has no model.safetensors (nor an index of shards)")
    with _open_shard(single) as shard:
        return dict.fromkeys(shard.keys(), single.name)


def _open_shard(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigurationError(f"cannot read {file}: {error}") from error
