"""Triton kernel of the rotary embedding (Su et al., arXiv 2104.09864) that also writes the KV cache.

Each program processes one head of one row. It normalizes queries and keys if the model has a norm per head, rotates
them, and writes keys and values to the cache.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from cluster.engine.batch import Batch

OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}


@triton.jit  # type: ignore[untyped-decorator]
def rotate_kernel(  # type: ignore[no-untyped-def]
    query, keys, values, qkv, head_norm, cosines, sines, positions, slots, num_heads, num_kv_heads, slot_stride,
    has_norm: tl.constexpr, head_dim: tl.constexpr, padded_half: tl.constexpr, eps: tl.constexpr
):  # fmt: skip
    """Program (row, head): a row has the heads of the query, then of the keys, then of the values.

    Rounds every product and sum to the dtype of `query`, as PyTorch's operators do.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half: tl.constexpr = head_dim // 2
    place = tl.arange(0, padded_half)
    is_there = place < half
    dtype = query.dtype.element_ty
    source = qkv + (row * (num_heads + 2 * num_kv_heads) + head) * head_dim + place
    first = tl.load(source, mask=is_there, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=is_there, other=0.0).to(tl.float32)
    slot = tl.load(slots + row) * slot_stride
    if head >= num_heads + num_kv_heads:
        target = values + slot + (head - num_heads - num_kv_heads) * head_dim + place
        tl.store(target, first, mask=is_there)
        tl.store(target + half, second, mask=is_there)
        return
    if has_norm:
        mean = (tl.sum(first * first, 0) + tl.sum(second * second, 0)) / head_dim
        scale = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
        weight = head_norm + head * head_dim + place
        first_weight = tl.load(weight, mask=is_there, other=0.0).to(tl.float32)
        second_weight = tl.load(weight + half, mask=is_there, other=0.0).to(tl.float32)
        first = ((first * scale).to(dtype).to(tl.float32) * first_weight).to(dtype).to(tl.float32)
        second = ((second * scale).to(dtype).to(tl.float32) * second_weight).to(dtype).to(tl.float32)
    angle = tl.load(positions + row) * half + place
    cosine = tl.load(cosines + angle, mask=is_there, other=0.0).to(tl.float32)
    sine = tl.load(sines + angle, mask=is_there, other=0.0).to(tl.float32)
    turned_first = (first * cosine).to(dtype).to(tl.float32) - (second * sine).to(dtype).to(tl.float32)
    turned_second = (second * cosine).to(dtype).to(tl.float32) + (first * sine).to(dtype).to(tl.float32)
    if head < num_heads:
        target = query + (row * num_heads + head) * head_dim + place
    else:
        target = keys + slot + (head - num_heads) * head_dim + place
    tl.store(target, turned_first, mask=is_there)
    tl.store(target + half, turned_second, mask=is_there)


def constants(head_dim: int, eps: float, *, has_norm: bool) -> dict[str, Any]:
    """Returns the compile-time constants of `rotate_kernel`."""
    padded_half = triton.next_power_of_2(head_dim // 2)
    return {"has_norm": has_norm, "head_dim": head_dim, "padded_half": padded_half, "eps": eps}


def rotate_and_write(
    qkv: torch.Tensor,
    head_norm: torch.Tensor | None,
    angles: tuple[torch.Tensor, torch.Tensor],
    batch: Batch,
    keys: torch.Tensor,
    values: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Returns the rotated query heads, [num_rows, num_heads, head_dim]; writes keys and values of `batch`.

    `qkv` [num_rows, (num_heads + 2 * num_kv_heads) * head_dim], contiguous. `head_norm` [num_heads + num_kv_heads,
    head_dim]: weights of the norms of queries and keys; None: the model has no such norms. `angles`: cos and
    sin of every position, [max_position_embeddings, head_dim / 2]. `keys`, `values` [num_slots, num_kv_heads,
    head_dim].
    """
    num_rows, (_, num_kv_heads, head_dim) = len(qkv), keys.shape
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    query = torch.empty(num_rows, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    assert qkv.is_contiguous()
    assert head_norm is None or head_norm.is_contiguous()
    if num_rows:
        rotate_kernel[(num_rows, num_heads + 2 * num_kv_heads)](
            *(query, keys, values, qkv, qkv if head_norm is None else head_norm, *angles),
            *(batch.positions, batch.slots, num_heads, num_kv_heads, keys.stride(0)),
            **constants(head_dim, eps, has_norm=head_norm is not None),
            **OPTIONS,
        )
    return query
