"""Attention of a packed step in fixed shapes: what a CUDA graph can hold, and one call for all segments.

Rows are set out as [segments, most rows of one], contexts as [segments, longest context], both padded; nothing is read
back to the host. It costs a copy of the contexts, which `varlen_attn` with a block table would not, but takes trees,
windows and blocks of any size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from cluster.engine.batch import Batch


class PaddedAttention:
    """Where the rows of a step go and what each sees: a plan of attention (`AttentionPlan`).

    `max_rows` and `max_context` bound what any segment of `batch` has.
    """

    def __init__(self, batch: Batch, block_size: int, max_rows: int, max_context: int) -> None:
        device = batch.token_ids.device
        rows = torch.arange(len(batch.token_ids), device=device)
        # Rows that pad the step are in one more segment after the others, where they may overwrite each other.
        self._segment_of = torch.bucketize(rows, batch.row_starts[1:], right=True)
        self._place_of = (rows - batch.row_starts[self._segment_of]).clamp(max=max_rows - 1)
        self._shape = (len(batch.context_lens) + 1, max_rows)
        positions = torch.arange(max_context, device=device)
        blocks = (positions // block_size).clamp(max=batch.block_tables.shape[1] - 1)
        tables = F.pad(batch.block_tables, (0, 0, 0, 1))
        self._slots = tables[:, blocks] * block_size + positions % block_size
        self._prefix_of = F.pad(batch.prefix_lens, (0, 1))[self._segment_of][:, None]  # of every row
        self._batch = batch
        self._positions = positions
        self._masks: dict[int, torch.Tensor] = {}  # by span: layers of one span share them

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, span: int) -> torch.Tensor:
        mask = self._masks.get(span)
        if mask is None:
            mask = self._masks[span] = self._mask(span)
        padded = query.new_zeros(*self._shape, *query.shape[1:])
        padded[self._segment_of, self._place_of] = query
        attended = F.scaled_dot_product_attention(
            padded.transpose(1, 2),
            keys[self._slots].transpose(1, 2),
            values[self._slots].transpose(1, 2),
            attn_mask=mask,
            enable_gqa=query.shape[1] != keys.shape[1],
        )
        return attended.transpose(1, 2)[self._segment_of, self._place_of]

    def _mask(self, span: int) -> torch.Tensor:
        """What every row sees of its context: bool [num_segments + 1, 1, max_rows, max_context]."""
        batch, positions, prefix = self._batch, self._positions, self._prefix_of
        max_context = len(positions)
        row_positions = batch.positions[:, None]
        seen = (positions <= row_positions) & (positions > row_positions - span)
        if batch.paths is not None:
            is_tree = batch.paths[:, :1] >= 0
            depths = torch.arange(batch.paths.shape[1], device=positions.device)
            # One column more takes what is not seen.
            on_path = torch.zeros(len(row_positions), max_context + 1, dtype=torch.bool, device=positions.device)
            in_window = (batch.paths >= 0) & (prefix + depths > row_positions - span)
            on_path.scatter_(1, torch.where(in_window, prefix + batch.paths, max_context), True)
            in_tree = torch.where(positions < prefix, positions > row_positions - span, on_path[:, :-1])
            seen = torch.where(is_tree, in_tree, seen)
        mask = torch.zeros(*self._shape, max_context, dtype=torch.bool, device=positions.device)
        mask[:, :, 0] = True  # a row that is not there sees something, or its softmax would be of nothing
        mask[self._segment_of, self._place_of] = seen
        return mask[:, None]
