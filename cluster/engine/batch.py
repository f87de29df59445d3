"""What one step computes: consecutive tokens of any mix of sequences, packed without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of a step that belongs to one sequence: a prefill chunk, a decode token or a verify segment.

    `token_ids` are the inputs at positions `num_computed_tokens` and after; the KV of all earlier positions is in
    the cache. Logits are wanted of the last `num_logits` rows.
    """

    token_ids: Sequence[int]
    num_computed_tokens: int
    block_table: Sequence[int]
    num_logits: int

    @property
    def context_len(self) -> int:
        """Tokens that the last row attends to, itself included."""
        return self.num_computed_tokens + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class SegmentContext:
    """Where one segment's rows are in the packed batch, and which slots hold its context."""

    start: int
    num_rows: int
    slots: torch.Tensor  # int64 [context_len]


@dataclass(frozen=True, slots=True)
class Batch:
    """A packed step on the device."""

    token_ids: torch.Tensor  # int64 [num_tokens]
    positions: torch.Tensor  # int64 [num_tokens]
    slots: torch.Tensor  # int64 [num_tokens]: where each row's KV goes
    logit_rows: torch.Tensor  # int64 [num_logit_rows]
    segments: tuple[SegmentContext, ...]


def pack(segments: Sequence[Segment], block_size: int, device: torch.device) -> Batch:
    """Packs `segments` in their order; rows of logits come out in the same order."""
    token_ids: list[int] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    contexts: list[SegmentContext] = []
    new_slots: list[torch.Tensor] = []
    offsets = torch.arange(block_size)
    for segment in segments:
        start, num_rows, context_len = len(token_ids), len(segment.token_ids), segment.context_len
        token_ids.extend(segment.token_ids)
        positions.extend(range(segment.num_computed_tokens, context_len))
        logit_rows.extend(range(start + num_rows - segment.num_logits, start + num_rows))
        num_blocks = -(-context_len // block_size)
        assert num_blocks <= len(segment.block_table)
        blocks = torch.tensor(segment.block_table[:num_blocks])
        slots = (blocks[:, None] * block_size + offsets).flatten()[:context_len]
        new_slots.append(slots[segment.num_computed_tokens :])
        contexts.append(SegmentContext(start, num_rows, slots.to(device)))
    return Batch(
        token_ids=torch.tensor(token_ids, device=device),
        positions=torch.tensor(positions, device=device),
        slots=torch.cat(new_slots).to(device),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
        segments=tuple(contexts),
    )
