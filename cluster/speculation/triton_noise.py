"""A Triton kernel for `device_noise`: the words of the shared noise on a GPU in one launch.

PyTorch's operators take several hundred launches for the same words, which is 6 ms per step on an H100.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TOKENS_PER_BLOCK = 8
_BLOCKS_PER_PROGRAM = 128


@triton.jit
def philox(key_low, key_high, position, block):  # type: ignore[no-untyped-def]
    """Returns Philox4x64-10 of the counters (block, position, 0, 0): four uint64 words, each of the shape of `block`.

    Key words and position are scalars; only their bits matter.
    """
    c0 = block.to(tl.uint64)
    c1 = position.to(tl.uint64) + tl.zeros_like(c0)
    c2 = tl.zeros_like(c0)
    c3 = tl.zeros_like(c0)
    k0 = key_low.to(tl.uint64) + tl.zeros_like(c0)
    k1 = key_high.to(tl.uint64) + tl.zeros_like(c0)
    multiplier0 = tl.full(c0.shape, 0xD2E7470EE14C6C93, tl.uint64)
    multiplier1 = tl.full(c0.shape, 0xCA5A826395121157, tl.uint64)
    weyl0 = tl.full(c0.shape, 0x9E3779B97F4A7C15, tl.uint64)
    weyl1 = tl.full(c0.shape, 0xBB67AE8584CAA73B, tl.uint64)
    for _ in tl.static_range(10):
        high0, high1 = tl.umulhi(multiplier0, c0), tl.umulhi(multiplier1, c2)
        low0, low1 = multiplier0 * c0, multiplier1 * c2
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + weyl0, k1 + weyl1
    return c0, c1, c2, c3


@triton.jit  # type: ignore[untyped-decorator]
def _uniforms(  # type: ignore[no-untyped-def]
    key_low, key_high, position, uniform, num_tokens, num_blocks: tl.constexpr
):
    """Program (draw, `num_blocks` counters): writes the uniforms of these counters' tokens."""
    draw = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * num_blocks + tl.arange(0, num_blocks)
    low, high = tl.load(key_low + draw), tl.load(key_high + draw)
    c0, c1, c2, c3 = philox(low, high, tl.load(position + draw), block)
    first_token = block * 8
    row = uniform + draw * num_tokens
    for place in tl.static_range(8):
        word = c0 if place < 2 else c1 if place < 4 else c2 if place < 6 else c3
        half = (word >> (32 * (place % 2))) & 0xFFFFFFFF
        token = first_token + place
        tl.store(row + token, (half.to(tl.float64) + 0.5) * (1.0 / 4294967296.0), mask=token < num_tokens)


def uniforms(low: torch.Tensor, high: torch.Tensor, position: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Returns (word + 1/2) / 2**32 of every token: float64 [num_draws, num_tokens].

    `low`, `high` and `position` are int64 [num_draws] on one device. `low` and `high` have the bits of unsigned words.
    """
    result = torch.empty(len(position), num_tokens, dtype=torch.float64, device=position.device)
    per_program = _BLOCKS_PER_PROGRAM * _TOKENS_PER_BLOCK
    grid = (len(position), -(-num_tokens // per_program))
    inputs = (low.contiguous(), high.contiguous(), position.contiguous())
    _uniforms[grid](*inputs, result, num_tokens, num_blocks=_BLOCKS_PER_PROGRAM)
    return result
