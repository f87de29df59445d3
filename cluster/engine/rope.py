"""Rotary angles (Su et al., arXiv 2104.09864), in float32 and in the order of operations of `transformers`. At position
100,000 one unit in the last place of a frequency is a hundredth of a radian.

Only powers, cosines and sines are computed more precisely and rounded once: libraries differ in their last bits, so a
model would have other logits on another processor.
"""

from __future__ import annotations

import math
from decimal import Decimal
from functools import lru_cache

import torch
import torch.nn.functional as F

from cluster.engine.cpu_kernels import kernels
from cluster.engine.model_config import ModelConfig
from cluster.engine.rope_config import LinearScaling, Llama3Scaling, LongRopeScaling, RopeConfig, YarnScaling


def rotary_table(config: ModelConfig, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns cos and sin of every position in `layer`, [max_position_embeddings, head_dim / 2], contiguous.

    Layers and models with the same settings share the tensors. Dimensions that are not rotated have angles of 0.
    """
    return _table(config.rope_of(layer), config.head_dim, config.max_position_embeddings)


@lru_cache(maxsize=4)  # two kinds of layers of a target and a draft in the same process
def _table(rope: RopeConfig, head_dim: int, max_position_embeddings: int) -> tuple[torch.Tensor, torch.Tensor]:
    theta, scaling = rope.theta, rope.scaling
    num_rotated = rope.num_rotated(head_dim)
    exponents = torch.arange(0, num_rotated, 2, dtype=torch.float32) / num_rotated
    # Positions per radian of each frequency.
    periods = torch.tensor([float(Decimal(theta) ** Decimal(exponent)) for exponent in exponents.tolist()])
    frequencies = 1.0 / periods
    amplitude = 1.0
    if isinstance(scaling, LinearScaling):
        frequencies = frequencies / scaling.factor
    elif isinstance(scaling, Llama3Scaling):
        frequencies = _llama3(frequencies, scaling)
    elif isinstance(scaling, YarnScaling):
        frequencies = _yarn(periods, theta, scaling)
        amplitude = scaling.attention_factor
    elif isinstance(scaling, LongRopeScaling):
        frequencies = 1.0 / (torch.tensor(scaling.factors) * periods)
        amplitude = scaling.attention_factor
    positions = torch.arange(max_position_embeddings, dtype=torch.float32)
    cos, sin = _cos_sin(torch.outer(positions, frequencies))
    num_kept = (head_dim - num_rotated) // 2
    return F.pad(cos * amplitude, (0, num_kept), value=1.0), F.pad(sin * amplitude, (0, num_kept))


def _cos_sin(angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if kernels is None:  # differs from the kernel in rare last bits
        return angles.double().cos().float(), angles.double().sin().float()
    cos, sin = torch.empty_like(angles), torch.empty_like(angles)
    kernels.cos_sin(angles.data_ptr(), angles.numel(), cos.data_ptr(), sin.data_ptr())
    return cos, sin


def _llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Returns the scaled frequencies, [head_dim / 2]."""
    original, low, high = (
        scaling.original_max_position_embeddings,
        scaling.low_freq_factor,
        scaling.high_freq_factor,
    )
    wavelengths = 2 * math.pi / frequencies
    slowed = frequencies / scaling.factor
    share = (original / wavelengths - low) / (high - low)
    blended = (1 - share) * frequencies / scaling.factor + share * frequencies
    kept_or_blended = torch.where(wavelengths < original / high, frequencies, blended)
    return torch.where(wavelengths > original / low, slowed, kept_or_blended)


def _yarn(periods: torch.Tensor, theta: float, scaling: YarnScaling) -> torch.Tensor:
    """Returns the scaled frequencies, [head_dim / 2]. `periods`: inverse frequencies, [head_dim / 2]."""
    head_dim = 2 * len(periods)

    def index_that_turns(times: float) -> float:
        """Returns the frequency, counted in dimensions, that turns `times` times in the original context."""
        turned = scaling.original_max_position_embeddings / (times * 2 * math.pi)
        return head_dim * math.log(turned) / (2 * math.log(theta))

    first, last = index_that_turns(scaling.beta_fast), index_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    kept = 1 - ((torch.arange(len(periods), dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept
