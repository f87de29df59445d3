"""Attention of a packed step over the paged KV cache, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from cluster.engine.batch import Batch
from cluster.engine.kv_cache import KVCache


def paged_attention(query: torch.Tensor, kv_cache: KVCache, layer: int, batch: Batch) -> torch.Tensor:
    """Causal attention of every segment over its own context.

    `query` [num_tokens, num_heads, head_dim]; this step's keys and values are already in the cache. Returns the
    shape of `query`.
    """
    keys, values = kv_cache.keys[layer], kv_cache.values[layer]
    output = torch.empty_like(query)
    starts, context_lens = batch.row_starts.tolist(), batch.context_lens.tolist()
    offsets = torch.arange(kv_cache.block_size, device=query.device)
    for index, context_len in enumerate(context_lens):
        rows = slice(starts[index], starts[index + 1])
        slots = (batch.block_tables[index][:, None] * kv_cache.block_size + offsets).flatten()[:context_len]
        mask = _mask(
            rows.stop - rows.start, context_len, None if batch.paths is None else batch.paths[rows], query.device
        )
        output[rows] = _attend(query[rows], keys.index_select(0, slots), values.index_select(0, slots), mask)
    return output


def _mask(num_rows: int, context_len: int, paths: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    """What each of a segment's rows sees of its context: everything up to itself, or in a tree its ancestors."""
    if num_rows == 1:
        return None
    if paths is None or paths[0, 0] < 0:
        return torch.ones(num_rows, context_len, dtype=torch.bool, device=device).tril_(context_len - num_rows)
    mask = torch.zeros(num_rows, context_len + 1, dtype=torch.bool, device=device)
    base = context_len - num_rows
    mask[:, :base] = True
    mask.scatter_(1, torch.where(paths < 0, context_len, base + paths), True)  # the last column takes what is no node
    return mask[:, :context_len]


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=mask,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return attended[0].transpose(0, 1)
