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
    starts, context_lens, bases = batch.row_starts.tolist(), batch.context_lens.tolist(), batch.prefix_lens.tolist()
    offsets = torch.arange(kv_cache.block_size, device=query.device)
    for index, context_len in enumerate(context_lens):
        rows = slice(starts[index], starts[index + 1])
        num_rows = starts[index + 1] - starts[index]
        base = bases[index]
        first_seen = max(0, base + 1 - span)  # by any row
        slots = (batch.block_tables[index][:, None] * kv_cache.block_size + offsets).flatten()[first_seen:context_len]
        paths = None if batch.paths is None else batch.paths[rows]
        mask = None
        if context_len > base + 1:
            mask = _mask(num_rows, base, context_len, span, paths, query.device)[:, first_seen:]
        output[rows] = _attend(query[rows], keys.index_select(0, slots), values.index_select(0, slots), mask)
    return output


def _mask(
    num_rows: int, base: int, context_len: int, span: int, paths: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """What each of a segment's rows sees of its context: the last `span` positions up to its own, or, in a tree, of
    the path to it. The path's nodes have the places from `base` on."""
    if paths is None or paths[0, 0] < 0:
        mask = torch.ones(num_rows, context_len, dtype=torch.bool, device=device).tril_(base)
        return mask.triu_(base - span + 1)
    own_depths = (paths >= 0).sum(dim=1, keepdim=True) - 1
    depths = torch.arange(paths.shape[1], device=device)
    is_seen = (paths >= 0) & (depths > own_depths - span)
    # One column more takes what is not seen.
    mask = torch.zeros(num_rows, context_len + 1, dtype=torch.bool, device=device)
    mask[:, :base] = torch.arange(base, device=device) > base + own_depths - span
    mask.scatter_(1, torch.where(is_seen, base + paths, context_len), True)
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
