"""Attention of a packed step over the paged KV cache with PyTorch's operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from cluster.engine.batch import Batch

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias


@dataclass(frozen=True, slots=True)
class _View:
    """Cache slots that a segment reads, and its mask over them."""

    rows: slice
    slots: torch.Tensor  # [num_seen]
    mask: torch.Tensor | CausalBias | None  # bool [num_rows, num_seen]; None: every row sees all


class GatheredAttention:
    """Attention of a step's rows. One object serves all layers of a step.

    Calls PyTorch once for every segment, with keys and values gathered from its blocks. Copies the segments' lengths
    from the device to the host.
    """

    def __init__(self, batch: Batch, block_size: int) -> None:
        self._batch = batch
        self._block_size = block_size
        self._views: dict[int, list[_View]] = {}  # views by span: layers of one span share them

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, span: int) -> torch.Tensor:
        """Returns the causal attention of every segment over its context, in the shape of `query`.

        A row sees the last `span` positions up to and including its own. `query` [num_tokens, num_heads, head_dim].
        `keys` and `values` are a layer's cache [num_slots, num_kv_heads, head_dim], which already contains the keys and
        values of this step.
        """
        views = self._views.get(span)
        if views is None:
            views = self._views[span] = self._views_of(span)
        output = torch.empty_like(query)
        for view in views:
            output[view.rows] = _attend(
                query[view.rows], keys.index_select(0, view.slots), values.index_select(0, view.slots), view.mask
            )
        return output

    def _views_of(self, span: int) -> list[_View]:
        batch, block_size, device = self._batch, self._block_size, self._batch.token_ids.device
        starts, prefix_lens = batch.row_starts.tolist(), batch.prefix_lens.tolist()
        offsets = torch.arange(block_size, device=device)
        views = []
        for index, context_len in enumerate(batch.context_lens.tolist()):
            rows, prefix_len = slice(starts[index], starts[index + 1]), prefix_lens[index]
            first_seen = max(0, prefix_len + 1 - span)  # first token that a row of the segment sees
            slots = (batch.block_tables[index][:, None] * block_size + offsets).flatten()[first_seen:context_len]
            mask: torch.Tensor | CausalBias | None = None
            is_chain = batch.paths is None or bool(batch.paths[rows][0, 0] < 0)
            if device.type == "cuda" and is_chain and span >= context_len:
                # With an explicit mask cuDNN plans again for every context length, which takes 45 ms on an H100.
                from torch.nn.attention.bias import causal_lower_right  # slow: half of the import time of a CPU worker

                mask = causal_lower_right(rows.stop - rows.start, context_len)
            elif context_len > prefix_len + 1:
                paths = None if batch.paths is None else batch.paths[rows]
                mask = _mask(rows.stop - rows.start, prefix_len, context_len, span, paths, device)[:, first_seen:]
            views.append(_View(rows, slots, mask))
        return views


def _mask(
    num_rows: int, prefix_len: int, context_len: int, span: int, paths: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """Returns the mask of a segment's rows over its context, bool [num_rows, context_len].

    A row sees the last `span` positions up to itself. In a tree, these are positions of the prefix and of the path to
    the row's node. Node n of the tree is in column `prefix_len + n`.
    """
    if paths is None or paths[0, 0] < 0:
        mask = torch.ones(num_rows, context_len, dtype=torch.bool, device=device).tril_(prefix_len)
        return mask.triu_(prefix_len - span + 1)
    row_depths = (paths >= 0).sum(dim=1, keepdim=True) - 1
    depths = torch.arange(paths.shape[1], device=device)
    is_seen = (paths >= 0) & (depths > row_depths - span)
    # The additional column takes the unseen positions.
    mask = torch.zeros(num_rows, context_len + 1, dtype=torch.bool, device=device)
    mask[:, :prefix_len] = torch.arange(prefix_len, device=device) > prefix_len + row_depths - span
    mask.scatter_(1, torch.where(is_seen, prefix_len + paths, context_len), True)
    return mask[:, :context_len]


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | CausalBias | None
) -> torch.Tensor:
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=mask,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return attended[0].transpose(0, 1)
