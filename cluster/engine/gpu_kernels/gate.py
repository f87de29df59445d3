"""Gated activations SwiGLU and GEGLU (Shazeer, arXiv 2002.05202) in Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

COLUMNS = 1024  # columns of a program
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit  # type: ignore[untyped-decorator]
def gate_kernel(output, gate_up, length, has_gelu: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program (row, part): multiplies a part of the row's second half by the activation of the first half."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * columns + tl.arange(0, columns)
    is_there = place < length
    source = gate_up + row * 2 * length + place
    gate = tl.load(source, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(source + length, mask=is_there, other=0.0).to(tl.float32)
    logit = gate
    if has_gelu:  # by tanh (Hendrycks, Gimpel, arXiv 1606.08415), which is a sigmoid of twice its argument
        logit = 1.5957691216 * (gate + 0.044715 * gate * gate * gate)
    activated = tl.div_rn(gate, 1.0 + tl.exp(-logit)).to(output.dtype.element_ty).to(tl.float32)
    tl.store(output + row * length + place, activated * up, mask=is_there)


def constants(*, has_gelu: bool = False) -> dict[str, Any]:
    """Returns the compile-time constants of `gate_kernel`."""
    return {"has_gelu": has_gelu, "columns": COLUMNS}


def gated(gate_up: torch.Tensor, *, has_gelu: bool = False) -> torch.Tensor:
    """Returns silu(gate) * up, or gelu(gate) * up, [num_rows, length].

    `gate_up` [num_rows, 2 * length]: gate and up, contiguous.
    The activation is rounded to the dtype before the product, as in PyTorch's operators.
    """
    num_rows, length = len(gate_up), gate_up.shape[1] // 2
    output = torch.empty(num_rows, length, dtype=gate_up.dtype, device=gate_up.device)
    assert gate_up.is_contiguous()
    if num_rows:
        gate_kernel[(num_rows, triton.cdiv(length, COLUMNS))](
            output, gate_up, length, **constants(has_gelu=has_gelu), **OPTIONS
        )
    return output
