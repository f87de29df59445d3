"""Attention of a packed step over the paged KV cache, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from cluster.engine.batch import SegmentContext


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    segments: Sequence[SegmentContext],
) -> torch.Tensor:
    """Causal attention of every segment over its own context.

    `query` [num_tokens, num_heads, head_dim]; `keys`, `values` [num_slots, num_kv_heads, head_dim], one layer of
    the cache with this step's rows already written. Returns [num_tokens, num_heads, head_dim].
    """
    output = torch.empty_like(query)
    for segment in segments:
        rows = slice(segment.start, segment.start + segment.num_rows)
        output[rows] = _attend(query[rows], keys.index_select(0, segment.slots), values.index_select(0, segment.slots))
    return output


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The last `len(query)` positions of a context attend to everything up to themselves."""
    num_rows, context_len = query.shape[0], keys.shape[0]
    mask = None
    if num_rows > 1:
        mask = torch.ones(num_rows, context_len, dtype=torch.bool, device=query.device).tril_(context_len - num_rows)
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=mask,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return attended[0].transpose(0, 1)
