"""The shape of a model, read from the `config.json` of a Hugging Face folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.errors import ConfigurationError

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama-family decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def resolve_max_model_len(self, wanted: int | None) -> int:
        """`wanted`, or the model's own limit. Raises ConfigurationError when that is less."""
        if wanted is not None and wanted > self.max_position_embeddings:
            raise ConfigurationError(
                f"max_model_len {wanted} exceeds the {self.max_position_embeddings} positions of the model"
            )
        return wanted or self.max_position_embeddings

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Raises ConfigurationError when the architecture, or something it asks for, is not supported."""
        values = _read_json(folder / "config.json")
        architectures = values.get("architectures") or ["none"]
        if architectures[0] not in SUPPORTED_ARCHITECTURES:
            raise ConfigurationError(
                f"{folder} holds a {architectures[0]}; supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
            )
        for key, supported in (
            ("hidden_act", "silu"),
            ("attention_bias", False),
            ("mlp_bias", False),
        ):
            if values.get(key, supported) != supported:
                raise ConfigurationError(f"{folder}: {key} {values[key]!r} is not supported")
        try:
            return cls._from_values(folder, values)
        except KeyError as error:
            raise ConfigurationError(f"{folder}: config.json has no {error}") from error

    @classmethod
    def _from_values(cls, folder: Path, values: dict[str, Any]) -> ModelConfig:
        num_heads = int(values["num_attention_heads"])
        return cls(
            vocab_size=int(values["vocab_size"]),
            hidden_size=int(values["hidden_size"]),
            intermediate_size=int(values["intermediate_size"]),
            num_layers=int(values["num_hidden_layers"]),
            num_heads=num_heads,
            num_kv_heads=int(values.get("num_key_value_heads") or num_heads),
            head_dim=int(values.get("head_dim") or values["hidden_size"] // num_heads),
            rms_norm_eps=float(values["rms_norm_eps"]),
            rope_theta=_rope_theta(folder, values),
            max_position_embeddings=int(values["max_position_embeddings"]),
            tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
            eos_token_ids=_eos_token_ids(folder, values),
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error
    assert isinstance(values, dict)
    return values


def _rope_theta(folder: Path, values: dict[str, Any]) -> float:
    # transformers 5 writes rope_parameters; earlier releases wrote rope_theta and rope_scaling.
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ConfigurationError(f"{folder}: RoPE scaling {kind!r} is not supported")
    return float(rope.get("rope_theta", values.get("rope_theta", 10_000.0)))


def _eos_token_ids(folder: Path, values: dict[str, Any]) -> tuple[int, ...]:
    # The generation config is the one that lists every way a model may end.
    generation = folder / "generation_config.json"
    if generation.is_file():
        values = {**values, **_read_json(generation)}
    eos = values.get("eos_token_id")
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (int(eos),)
