"""What one step computes: consecutive tokens of any mix of sequences, packed without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
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
class Batch:
    """A packed step: int64 tensors on the device."""

    token_ids: torch.Tensor  # [num_tokens]
    positions: torch.Tensor  # [num_tokens]
    slots: torch.Tensor  # [num_tokens]: where each row's KV goes
    logit_rows: torch.Tensor  # [num_logit_rows]
    row_starts: torch.Tensor  # [num_segments + 1]: a segment's rows lie between its start and the next
    context_lens: torch.Tensor  # [num_segments]
    block_tables: torch.Tensor  # [num_segments, longest table], zero beyond a segment's own


def pack(segments: Sequence[Segment], block_size: int, device: torch.device) -> Batch:
    """Packs `segments` in their order; rows of logits come out in the same order."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    row_starts = [0]
    longest = max(-(-segment.context_len // block_size) for segment in segments)
    block_tables = np.zeros((len(segments), longest), dtype=np.int64)
    for index, segment in enumerate(segments):
        num_blocks = -(-segment.context_len // block_size)
        assert num_blocks <= len(segment.block_table)
        block_tables[index, :num_blocks] = segment.block_table[:num_blocks]
        own_positions = range(segment.num_computed_tokens, segment.context_len)
        table = segment.block_table
        token_ids.extend(segment.token_ids)
        positions.extend(own_positions)
        slots.extend([table[p // block_size] * block_size + p % block_size for p in own_positions])
        end = len(token_ids)
        logit_rows.extend(range(end - segment.num_logits, end))
        row_starts.append(end)

    def on_device(values: Sequence[int] | npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(device)

    return Batch(
        token_ids=on_device(token_ids),
        positions=on_device(positions),
        slots=on_device(slots),
        logit_rows=on_device(logit_rows),
        row_starts=on_device(row_starts),
        context_lens=on_device([segment.context_len for segment in segments]),
        block_tables=on_device(block_tables),
    )
