"""Input of one step: consecutive tokens of any mix of sequences, packed without padding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from cluster.speculation.device_copy import Words, copy_to
from cluster.speculation.drafts import path_to


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of a step that belongs to one sequence: a prefill chunk, a decode token or a verify segment.

    `token_ids` are the inputs at positions `num_computed_tokens` and after; the KV of all earlier positions is in
    the cache. The last `num_logits` rows yield logits.

    With `parents`, the tokens after the computed ones form a tree. `parents` has the index of each node's parent, or -1
    for a root; parents come before their children. Siblings have the same position, and among the nodes a node attends
    only to itself and its ancestors. Every node has its own slot, in the order of the nodes, until `ModelRunner.keep`
    closes the gaps. The step computes all nodes, or only `nodes` if the tree grows. The tokens of `nodes` are
    `token_ids`; their ancestors come before them or are in the cache.
    """

    token_ids: Sequence[int]
    num_computed_tokens: int
    block_table: Sequence[int]
    num_logits: int
    parents: Sequence[int] | None = None
    nodes: Sequence[int] | None = None

    @property
    def context_len(self) -> int:
        """Number of slots of the sequence that are in use after the step."""
        return self.num_computed_tokens + len(self.token_ids if self.parents is None else self.parents)

    def places(self) -> Sequence[int]:
        """Returns the place of each token in the sequence's slots."""
        if self.nodes is not None:
            return [self.num_computed_tokens + node for node in self.nodes]
        return range(self.num_computed_tokens, self.num_computed_tokens + len(self.token_ids))

    def paths(self) -> list[list[int]]:
        """Returns, for each token of a tree, the nodes from its root to itself."""
        assert self.parents is not None
        nodes = range(len(self.parents)) if self.nodes is None else self.nodes
        return [path_to(node, self.parents) for node in nodes]


@dataclass(frozen=True, slots=True)
class Batch:
    """A packed step. Its tensors are int64 and on the device."""

    token_ids: torch.Tensor  # [num_tokens]
    positions: torch.Tensor  # [num_tokens]
    slots: torch.Tensor  # [num_tokens]: slot for the KV of each row
    logit_rows: torch.Tensor  # [num_logit_rows]
    row_starts: torch.Tensor  # [num_segments + 1]: a segment's rows lie between its start and the next
    context_lens: torch.Tensor  # [num_segments]
    prefix_lens: torch.Tensor  # [num_segments]: number of tokens before the segment; in a tree, before its first node
    block_tables: torch.Tensor  # [num_segments, longest table], zero beyond a segment's table
    paths: torch.Tensor | None  # [num_tokens, longest path]: nodes, then -1; all -1 in chains; None: no trees
    max_rows: int  # rows of the largest segment


@dataclass(frozen=True, slots=True)
class Unread:
    """Parts of a step's input that are on the device, and that the host does not know yet.

    A token `-1 - i` of a segment is a stand-in for `token_ids[i]`. Segment i starts `shifts[i]` positions before its
    `num_computed_tokens`; None: no shifts.
    """

    token_ids: torch.Tensor  # int64 [num_unread]
    shifts: torch.Tensor | None = None  # int64 [num_segments]

    def tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns `token_ids`, in any shape, with each stand-in replaced by its token."""
        if not len(self.token_ids):  # then there are no stand-ins
            return token_ids
        return torch.where(token_ids < 0, self.token_ids[(-1 - token_ids).clamp(min=0)], token_ids)

    def resolve(self, batch: Batch, block_size: int) -> Batch:
        """Returns `batch` with real tokens and positions. Does not support trees."""
        batch = replace(batch, token_ids=self.tokens(batch.token_ids))
        if self.shifts is None:
            return batch
        num_rows, num_segments = len(batch.token_ids), len(self.shifts)
        segments = torch.arange(num_segments, device=self.shifts.device)
        segments = segments.repeat_interleave(batch.row_starts.diff(), output_size=num_rows)  # of each row
        positions = batch.positions - self.shifts[segments]
        blocks = batch.block_tables[segments, positions // block_size]
        return replace(
            batch,
            positions=positions,
            slots=blocks * block_size + positions % block_size,
            context_lens=batch.context_lens - self.shifts,
            prefix_lens=batch.prefix_lens - self.shifts,
        )


def pack(segments: Sequence[Segment], block_size: int, device: torch.device) -> Batch:
    """Returns a batch of `segments`, in their order. Its rows of logits are in the same order."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    row_starts = [0]
    paths: list[list[int]] = []
    longest = max(-(-segment.context_len // block_size) for segment in segments)
    block_tables = np.zeros((len(segments), longest), dtype=np.int64)
    for index, segment in enumerate(segments):
        num_blocks = -(-segment.context_len // block_size)
        assert num_blocks <= len(segment.block_table)
        block_tables[index, :num_blocks] = segment.block_table[:num_blocks]
        places = segment.places()
        token_ids.extend(segment.token_ids)
        slots.extend(slots_of(places, segment.block_table, block_size))
        if segment.parents is None:
            positions.extend(places)
            paths.extend([] for _ in places)
        else:
            tree_paths = segment.paths()
            positions.extend(segment.num_computed_tokens + len(path) - 1 for path in tree_paths)
            paths.extend(tree_paths)
        end = len(token_ids)
        logit_rows.extend(range(end - segment.num_logits, end))
        row_starts.append(end)

    context_lens = [segment.context_len for segment in segments]
    prefix_lens = [segment.num_computed_tokens for segment in segments]
    has_trees = any(paths)
    numbers: list[Sequence[int] | Words] = [token_ids, positions, slots, logit_rows, row_starts]
    numbers += [context_lens, prefix_lens, block_tables]
    rows = copy_to(device, [*numbers, _padded(paths)] if has_trees else numbers)
    return Batch(
        token_ids=rows[0],
        positions=rows[1],
        slots=rows[2],
        logit_rows=rows[3],
        row_starts=rows[4],
        context_lens=rows[5],
        prefix_lens=rows[6],
        block_tables=rows[7],
        paths=rows[8] if has_trees else None,
        max_rows=max(len(segment.token_ids) for segment in segments),
    )


def slots_of(places: Iterable[int], block_table: Sequence[int], block_size: int) -> list[int]:
    """Returns the slots of a sequence's `places`. Place 0 is that of its first token."""
    return [block_table[place // block_size] * block_size + place % block_size for place in places]


def _padded(paths: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    table = np.full((len(paths), max(map(len, paths))), -1, dtype=np.int64)
    for row, path in zip(table, paths, strict=True):
        row[: len(path)] = path
    return table
