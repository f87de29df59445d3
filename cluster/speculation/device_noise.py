"""Computes the shared noise (`cluster.speculation.noise`) on the logits' device, with PyTorch operators.

On a GPU one Triton kernel makes the words. Otherwise PyTorch makes them. It supports few operations on uint64, so int64
is used, which wraps in the same way. The right shift and the high half of a product differ for int64, so both are
composed from 32-bit halves.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence

import torch

from cluster.speculation.noise import NoiseKey

_MASK = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_TOKENS_PER_BLOCK = 8

logger = logging.getLogger(__name__)

_has_kernel = importlib.util.find_spec("triton") is not None  # PyTorch's builds for GPUs bring it


def gumbel_noise_on(device: torch.device, draws: Sequence[tuple[NoiseKey, int]], num_tokens: int) -> torch.Tensor:
    """Returns `noise.gumbel_noise` as float32 [len(draws), num_tokens], computed on `device`.

    The words are the same bit for bit. The logarithms are the device's, in float64, so the noise rarely differs between
    devices, and then only in the last bit. The draws are copied to the device once; nothing is copied back.
    """
    inputs = [(signed_word(key.low), signed_word(key.high), position) for key, position in draws]
    low, high, position = torch.tensor(inputs, dtype=torch.int64, device=device).unbind(1)
    return gumbel_noise_from(low, high, position, num_tokens)


def gumbel_noise_from(low: torch.Tensor, high: torch.Tensor, position: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Returns the noise of `gumbel_noise_on`, from existing tensors.

    `low`, `high` and `position` are int64 [num_draws]. `low` and `high` have the bits of the keys' unsigned words.
    """
    v = None if position.device.type == "cpu" else _by_kernel(low, high, position, num_tokens)
    if v is None:
        words = _words(low[:, None], high[:, None], position[:, None], num_tokens)
        v = words.to(torch.float64).add_(0.5).mul_(2.0**-32)
    return v.neg_().log1p_().neg_().log_().neg_().to(torch.float32)


def _by_kernel(low: torch.Tensor, high: torch.Tensor, position: torch.Tensor, num_tokens: int) -> torch.Tensor | None:
    """Returns the uniform numbers that the Triton kernel computes; None without Triton. Logs a failure once."""
    global _has_kernel
    if not _has_kernel:
        return None
    try:
        from cluster.speculation.triton_noise import uniforms

        return uniforms(low, high, position, num_tokens)
    except Exception as error:  # Triton compiles at the first call, which fails without a C compiler, for example
        logger.warning("PyTorch computes the noise, at some milliseconds per step: Triton's kernel failed: %s", error)
        _has_kernel = False
        return None


def _words(low: torch.Tensor, high: torch.Tensor, position: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Returns Philox4x64-10 words, int64 in [0, 2**32), [num_draws, num_tokens]; the inputs are [num_draws, 1]."""
    num_blocks = -(-num_tokens // _TOKENS_PER_BLOCK)
    block = torch.arange(num_blocks, device=position.device)
    c0 = block.expand(len(position), num_blocks)
    c1 = position.expand_as(c0)
    c2 = c3 = torch.zeros_like(c0)
    k0, k1 = low, high
    for turn in range(_ROUNDS):
        if turn:
            k0, k1 = k0 + signed_word(_WEYL[0]), k1 + signed_word(_WEYL[1])
        product0, product1 = c0 * signed_word(_MULTIPLIERS[0]), c2 * signed_word(_MULTIPLIERS[1])
        c0, c1, c2, c3 = (
            _high_half(c2, _MULTIPLIERS[1]) ^ c1 ^ k0,
            product1,
            _high_half(c0, _MULTIPLIERS[0]) ^ c3 ^ k1,
            product0,
        )
    words = torch.stack((c0, c1, c2, c3), dim=-1)
    halves = torch.stack((words & _MASK, (words >> 32) & _MASK), dim=-1)
    return halves.flatten(1)[:, :num_tokens]


def _high_half(a: torch.Tensor, b: int) -> torch.Tensor:
    """Returns the upper 64 bits of the unsigned product."""
    a_low, a_high = a & _MASK, (a >> 32) & _MASK
    b_low, b_high = b & _MASK, b >> 32
    carried = ((a_low * b_low) >> 32) & _MASK
    middle = a_high * b_low + carried
    other = a_low * b_high + (middle & _MASK)
    return a_high * b_high + ((middle >> 32) & _MASK) + ((other >> 32) & _MASK)


def signed_word(word: int) -> int:
    """Returns the int64 with the bits of an unsigned `word`."""
    return word - (1 << 64) if word >> 63 else word
