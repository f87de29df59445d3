"""RMS norm (Zhang and Sennrich, arXiv 1910.07467) in Triton, one program for each vector.

In PyTorch's reductions, the division of a sum among threads may depend on the number of rows. In this kernel it only
depends on the length of the vector.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_VALUES_PER_WARP = 512


@triton.jit  # type: ignore[untyped-decorator]
def norm_kernel(  # type: ignore[no-untyped-def]
    output, x, weight, row_stride, num_vectors, length: tl.constexpr, padded_length: tl.constexpr, eps: tl.constexpr
):  # fmt: skip
    """Program (row, vector): divides the vector by its root mean square, and multiplies it with its weights."""
    row = tl.program_id(0).to(tl.int64)
    vector = tl.program_id(1)
    place = tl.arange(0, padded_length)
    is_there = place < length
    values = tl.load(x + row * row_stride + vector * length + place, mask=is_there, other=0.0).to(tl.float32)
    mean = tl.sum(values * values, 0) / length
    normed = (values * tl.div_rn(1.0, tl.sqrt_rn(mean + eps))).to(output.dtype.element_ty).to(tl.float32)
    weights = tl.load(weight + vector * length + place, mask=is_there, other=0.0).to(tl.float32)
    tl.store(output + (row * num_vectors + vector) * length + place, weights * normed, mask=is_there)


def constants(length: int, eps: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the compile-time constants and the compile options of `norm_kernel` for vectors of `length` values."""
    padded_length = triton.next_power_of_2(length)
    num_warps = min(8, max(1, padded_length // _VALUES_PER_WARP))
    return (
        {"length": length, "padded_length": padded_length, "eps": eps},
        {"num_warps": num_warps, "enable_fp_fusion": False},
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns the norm over the last dimension of `x` [num_rows, ..., length]. `weight` is [..., length].

    Each row of `x` must be contiguous. As in `transformers`, the norm is computed in float32 and rounded to the dtype
    of `x` before the product with the weight.
    """
    num_rows, length = len(x), x.shape[-1]
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return output
    assert x[0].is_contiguous()
    num_vectors = x[0].numel() // length
    assert weight.is_contiguous()
    assert weight.numel() == num_vectors * length
    compiled, options = constants(length, eps)
    norm_kernel[(num_rows, num_vectors)](output, x, weight, x.stride(0), num_vectors, **compiled, **options)
    return output
