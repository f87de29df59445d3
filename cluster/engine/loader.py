"""Loads a Hugging Face folder into the engine's model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from cluster.config import LayerChoice
from cluster.engine.cpu_ops import CpuOps
from cluster.engine.linear import Linear
from cluster.engine.model import LayerWeights, LlamaModel, ModelWeights
from cluster.engine.model_config import ModelConfig
from cluster.engine.ops import Ops, TorchOps
from cluster.engine.quantization import Quantization, quantize
from cluster.errors import ConfigurationError

Progress = Callable[[int, int], None]
"""Told (tensors read, tensors in all) while a model loads."""

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
) -> LlamaModel:
    """Reads `folder` (config.json, one or several .safetensors). Raises ConfigurationError when it is incomplete.

    `layers` leaves the other layers out; `ops` are the operators to run it with, the fastest on its device unless
    given.
    """
    config = ModelConfig.from_folder(folder)
    chosen = range(config.num_layers) if layers is None else choose_layers(layers, config.num_layers)
    config = replace(config, num_layers=len(chosen))
    tensors = _TensorReader(folder, dtype, device, progress)
    ops = ops or make_ops(config, dtype, device)
    try:
        weights = _read_weights(config, ops, tensors, chosen, quantization)
    finally:
        tensors.close()
    return LlamaModel(config, weights, ops, dtype, device)


def make_ops(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Ops:
    """The fastest operators for the model on its device."""
    if device.type == "cpu" and CpuOps.supports(config, dtype):
        return CpuOps(config, dtype)
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
    config: ModelConfig, ops: Ops, tensors: _TensorReader, layers: Sequence[int], quantization: Quantization | None
) -> ModelWeights:
    hidden, intermediate = config.hidden_size, config.intermediate_size

    def linear(*parts: tuple[str, int], in_features: int) -> Linear:
        """One product for several projections of the same input, fused by stacking their rows."""
        weights = [tensors.read(f"{name}.weight", out, in_features) for name, out in parts]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        return ops.make_linear(weight if quantization is None else quantize(weight, quantization))

    def norm(name: str) -> torch.Tensor:
        return ops.make_norm_weight(tensors.read(f"{name}.weight", hidden))

    def layer(index: int) -> LayerWeights:
        attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
        return LayerWeights(
            input_norm=norm(f"model.layers.{index}.input_layernorm"),
            qkv=linear(
                (f"{attention}.q_proj", config.q_size),
                (f"{attention}.k_proj", config.kv_size),
                (f"{attention}.v_proj", config.kv_size),
                in_features=hidden,
            ),
            output=linear((f"{attention}.o_proj", hidden), in_features=config.q_size),
            post_attention_norm=norm(f"model.layers.{index}.post_attention_layernorm"),
            gate_up=linear(
                (f"{mlp}.gate_proj", intermediate),
                (f"{mlp}.up_proj", intermediate),
                in_features=hidden,
            ),
            down=linear((f"{mlp}.down_proj", hidden), in_features=intermediate),
        )

    embedding = tensors.read("model.embed_tokens.weight", config.vocab_size, hidden)
    return ModelWeights(
        embedding=embedding,
        layers=tuple(layer(index) for index in layers),
        norm=norm("model.norm"),
        head=ops.make_linear(embedding)
        if config.tie_word_embeddings
        else ops.make_linear(tensors.read("lm_head.weight", config.vocab_size, hidden)),
    )


class _TensorReader:
    """Reads tensors by name from the memory-mapped shards of a folder."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device, progress: Progress | None) -> None:
        self._folder, self._dtype, self._device, self._progress = folder, dtype, device, progress
        self._shards: dict[str, Any] = {}
        self._file_of = _weight_map(folder)
        self._num_read = 0

    def read(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor `name` in the model's dtype, on its device."""
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
        self._num_read += 1
        if self._progress is not None:
            self._progress(self._num_read, len(self._file_of))
        return tensor.to(device=self._device, dtype=self._dtype)

    def close(self) -> None:
        self._shards.clear()


def _weight_map(folder: Path) -> dict[str, str]:
    """Which file holds each tensor."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
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
