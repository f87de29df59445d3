"""Attention of a packed step over the paged KV cache, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from cluster.engine.batch import Batch
from cluster.engine.kv_cache import KVCache


def paged_attention(query: torch.Tensor, kv_cache: KVCache, layer: int, batch: Batch, span: int) -> torch.Tensor:
    """Causal attention of every segment over its own context; a row sees the last `span` positions up to its own.

    `query` [num_tokens, num_heads, head_dim]; this step's keys and values are already in the cache. Returns the
    shape of `query`.
    """
    keys, values = kv_cache.keys[layer], kv_cache.values[layer]
    output = torch.empty_like(query)
    starts, context_lens = batch.row_starts.tolist(), batch.context_lens.tolist()
    offsets = torch.arange(kv_cache.block_size, device=query.device)
    for index, context_len in enumerate(context_lens):
        rows = slice(starts[index], starts[index + 1])
        slots = (batch.block_tables[index][:, None] * kv_cache.block_size + offsets).flatten()
        first_row_sees = context_len - (rows.stop - rows.start) + 1
        slots = slots[max(0, first_row_sees - span) : context_len]
        output[rows] = _attend(query[rows], keys.index_select(0, slots), values.index_select(0, slots), span)
    return output


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, span: int) -> torch.Tensor:
    """The last `len(query)` positions of a context attend to the last `span` up to themselves."""
    num_rows, context_len = query.shape[0], keys.shape[0]
    mask = None
    if num_rows > 1:
        before = context_len - num_rows
        mask = torch.ones(num_rows, context_len, dtype=torch.bool, device=query.device).tril_(before)
        if span < context_len:
            mask.triu_(before - span + 1)
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=mask,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return attended[0].transpose(0, 1)
