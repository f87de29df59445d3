"""Scaling of a model's rotary angles, read from `config.json`. Imports no torch.

The engine supports only scaling that depends on nothing but the configuration. A rotation that depends on the current
length of the sequence ('longrope', 'dynamic' beyond its limit) would change keys that are already in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Linear scaling: every frequency is divided by `factor` (Chen et al., arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Scaling of Llama 3.1, by the number of turns of a frequency in the original context.

    Frequencies below `low_freq_factor` turns are divided by `factor`, frequencies above `high_freq_factor` turns are
    kept, and frequencies in between are blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al., arXiv 2309.00071): blends by the index of a frequency.

    Frequencies are blended between the one that turns `beta_fast` times in the original context and the one that turns
    `beta_slow` times. cos and sin are multiplied by `attention_factor`.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    theta: float
    scaling: RopeScaling | None = None

    def max_length(self, max_position_embeddings: int) -> int:
        """Returns the number of positions after scaling.

        YaRN is often added to a configuration whose `max_position_embeddings` is the original number of positions.
        """
        if not isinstance(self.scaling, YarnScaling):
            return max_position_embeddings
        return max(max_position_embeddings, int(self.scaling.factor * self.scaling.original_max_position_embeddings))

    @classmethod
    def from_values(cls, values: Values) -> RopeConfig:
        """Reads the scaling. Raises ValueError for unsupported settings, KeyError for missing ones."""
        # transformers 5 writes rope_parameters; earlier releases wrote rope_theta and rope_scaling.
        rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
        if any(isinstance(value, dict) for value in rope.values()):
            raise ValueError("RoPE parameters that differ by layer type are not supported; supported: one set for all")
        partial = rope.get("partial_rotary_factor", values.get("partial_rotary_factor"))
        if partial not in (None, 1):
            raise ValueError(f"partial_rotary_factor {partial!r} is not supported; supported: 1.0")
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in _READERS:
            raise ValueError(f"RoPE scaling {kind!r} is not supported; supported: {', '.join(_READERS)}")
        theta = rope.get("rope_theta") or values.get("rope_theta") or 10_000.0
        return cls(float(theta), _READERS[kind](values, rope))


def _none(values: Values, rope: Values) -> None:
    """Returns no scaling: 'dynamic' only changes positions beyond max_position_embeddings, which the engine refuses."""


def _linear(values: Values, rope: Values) -> LinearScaling:
    return LinearScaling(float(rope["factor"]))


def _llama3(values: Values, rope: Values) -> Llama3Scaling:
    return Llama3Scaling(
        float(rope["factor"]),
        float(rope["low_freq_factor"]),
        float(rope["high_freq_factor"]),
        _original_length(values, rope),
    )


def _yarn(values: Values, rope: Values) -> YarnScaling:
    original = _original_length(values, rope)
    factor = float(rope["factor"] or values["max_position_embeddings"] / original)

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor, mscale, all_dim = (rope.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if attention_factor is None:
        attention_factor = magnitude(mscale) / magnitude(all_dim) if mscale and all_dim else magnitude(1.0)
    return YarnScaling(
        factor,
        original,
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        truncate=bool(rope.get("truncate", True)),
        attention_factor=float(attention_factor),
    )


def _original_length(values: Values, rope: Values) -> int:
    name = "original_max_position_embeddings"
    return int(values.get(name) or rope.get(name) or values["max_position_embeddings"])


_READERS: dict[str, Callable[[Values, Values], RopeScaling | None]] = {
    "default": _none,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "dynamic": _none,
}
