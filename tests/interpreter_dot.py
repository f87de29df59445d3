"""A matrix product for Triton's interpreter that sums every element in the same order, as one GPU instruction does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def dot_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces `tl.dot`. The interpreter keeps bfloat16 as 16 bits, and its product takes them for integers.

    It also multiplies with NumPy, which on some processors sums a row in an order that depends on the number of rows.
    """

    def dot(builder: InterpreterBuilder, a: Any, b: Any, sums: Any, *_: Any) -> TensorHandle:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (builder.cast_impl(x, tl.block_type(tl.float32, list(x.data.shape))) for x in (a, b))
        left, right = (np.ascontiguousarray(x, dtype=sums.data.dtype) for x in (a.data.T, b.data))
        total = sums.data.copy()
        for column, row in zip(left, right, strict=True):
            total += column[:, None] * row
        return TensorHandle(total, sums.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
