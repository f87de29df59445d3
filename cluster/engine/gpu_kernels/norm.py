"""RMS norm (Zhang and Sennrich, arXiv 1910.07467) in Triton, one program for each row.

In PyTorch's reductions, the division of a sum among threads may depend on the number of rows. In this kernel it only
depends on the length of the row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_VALUES_PER_WARP = 512


@triton.jit  # type: ignore[untyped-decorator]
def norm_kernel(  # type: ignore[no-untyped-def]
    output, total, x, addend, weight,
    has_addend: tl.constexpr, length: tl.constexpr, padded_length: tl.constexpr, eps: tl.constexpr
):  # fmt: skip
    """Program (row,): divides the row by its root mean square, and multiplies it by the weights."""
    place = tl.arange(0, padded_length)
    is_there = place < length
    source = tl.program_id(0).to(tl.int64) * length + place
    dtype = output.dtype.element_ty
    values = tl.load(x + source, mask=is_there, other=0.0).to(tl.float32)
    if has_addend:
        values = (values + tl.load(addend + source, mask=is_there, other=0.0).to(tl.float32)).to(dtype)
        tl.store(total + source, values, mask=is_there)
        values = values.to(tl.float32)
    normed = (values * tl.div_rn(1.0, tl.sqrt_rn(tl.sum(values * values, 0) / length + eps))).to(dtype).to(tl.float32)
    weights = tl.load(weight + place, mask=is_there, other=0.0).to(tl.float32)
    tl.store(output + source, weights * normed, mask=is_there)


def constants(length: int, eps: float, *, has_addend: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the compile-time constants and the compile options of `norm_kernel` for rows of `length` values."""
    padded_length = triton.next_power_of_2(length)
    num_warps = min(8, max(1, padded_length // _VALUES_PER_WARP))
    return (
        {"has_addend": has_addend, "length": length, "padded_length": padded_length, "eps": eps},
        {"num_warps": num_warps, "enable_fp_fusion": False},
    )


def add_and_norm(
    x: torch.Tensor, addend: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `x + addend` and its norm, [num_rows, length] each. Without `addend`, the first is `x`.

    `x` and `addend` must be contiguous. As in `transformers`, the norm is computed in float32 and rounded to the dtype
    of `x` before the product with the weight.
    """
    num_rows, length = x.shape
    output, total = torch.empty_like(x), x if addend is None else torch.empty_like(x)
    if num_rows == 0:
        return total, output
    assert x.is_contiguous()
    assert weight.shape == (length,)
    assert weight.is_contiguous()
    if addend is not None:
        assert addend.shape == x.shape
        assert addend.is_contiguous()
    compiled, options = constants(length, eps, has_addend=addend is not None)
    norm_kernel[(num_rows,)](output, total, x, x if addend is None else addend, weight, **compiled, **options)
    return total, output
