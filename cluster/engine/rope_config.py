"""Scaling of a model's rotary angles, read from `config.json`. Imports no torch.

The engine supports only scaling that depends on nothing but the configuration. A rotation that depends on the current
length of the sequence ('dynamic' beyond its limit) would change keys that are already in the cache. 'longrope' has two
sets of factors; as in vLLM at the model's full length, those for long texts serve all texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Values = Mapping[str, Any]
LayerKind = Literal["full_attention", "sliding_attention"]
"The names of `layer_types` in config.json."


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


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE (Ding et al., arXiv 2402.13753): a divisor for each frequency."""

    factors: tuple[float, ...]
    attention_factor: float  # of cos and sin


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    theta: float
    scaling: RopeScaling | None = None
    rotated_share: float = 1.0  # of a head's dimensions, its first ones; the others keep their values

    def num_rotated(self, head_dim: int) -> int:
        """Returns the number of a head's dimensions that are rotated."""
        return int(self.rotated_share * head_dim)

    def check(self, head_dim: int) -> None:
        """Raises ValueError if heads of `head_dim` dimensions cannot be rotated so."""
        num_rotated = self.num_rotated(head_dim)
        if num_rotated % 2 or not 0 < num_rotated <= head_dim:
            raise ValueError(f"partial_rotary_factor {self.rotated_share:g} rotates {num_rotated} of {head_dim} values")
        if isinstance(self.scaling, LongRopeScaling) and len(self.scaling.factors) != num_rotated // 2:
            given = len(self.scaling.factors)
            raise ValueError(f"longrope has {given} factors for the {num_rotated // 2} pairs of values that turn")

    def max_length(self, max_position_embeddings: int) -> int:
        """Returns the number of positions after scaling.

        YaRN is often added to a configuration whose `max_position_embeddings` is the original number of positions.
        """
        if not isinstance(self.scaling, YarnScaling):
            return max_position_embeddings
        return max(max_position_embeddings, int(self.scaling.factor * self.scaling.original_max_position_embeddings))

    @classmethod
    def from_values(cls, values: Values, layers: LayerKind = "full_attention") -> RopeConfig:
        """Reads the settings of `layers`. Raises ValueError for unsupported settings, KeyError for missing ones."""
        # transformers 5 writes rope_parameters; earlier releases wrote rope_theta and rope_scaling.
        rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
        if any(isinstance(value, dict) for value in rope.values()):
            rope = rope[layers]
        elif layers == "sliding_attention" and "rope_local_base_freq" in values:  # Gemma 3's name, never scaled
            rope = {"rope_theta": values["rope_local_base_freq"]}
        share = rope.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in _READERS:
            raise ValueError(f"RoPE scaling {kind!r} is not supported; supported: {', '.join(_READERS)}")
        theta = rope.get("rope_theta") or values.get("rope_theta") or 10_000.0
        return cls(float(theta), _READERS[kind](values, rope), float(share))


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


def _longrope(values: Values, rope: Values) -> LongRopeScaling:
    original, longest = _original_length(values, rope), int(values["max_position_embeddings"])
    factors = rope["long_factor" if longest > original else "short_factor"]
    attention_factor, stretch = rope.get("attention_factor"), float(rope.get("factor") or longest / original)
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return LongRopeScaling(tuple(map(float, factors)), float(attention_factor))


def _original_length(values: Values, rope: Values) -> int:
    name = "original_max_position_embeddings"
    return int(values.get(name) or rope.get(name) or values["max_position_embeddings"])


_READERS: dict[str, Callable[[Values, Values], RopeScaling | None]] = {
    "default": _none,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "dynamic": _none,
    "longrope": _longrope,
}
