"""A target's KV blocks, counted: what `cluster.engine.scheduler` does with them, for many sequences at once.

No prefix is shared.
"""

from __future__ import annotations

import numpy as np

from cluster.engine.scheduler import watermark
from cluster.simulator.columns import Columns
from cluster.speculation.depth import IntArray


class Blocks:
    def __init__(self, columns: Columns, num_blocks: int, block_size: int) -> None:
        self.num_blocks = self.num_free = num_blocks
        self.most_used = 0
        self._columns = columns
        self._block_size = block_size
        self._watermark = watermark(num_blocks)

    def needed(self, lengths: IntArray) -> IntArray:
        """For so many tokens."""
        return -(-lengths // self._block_size)

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence of so many can run."""
        return -(-num_tokens // self._block_size) <= self.num_blocks

    def admit(self, row: int, *, is_alone: bool) -> bool:
        """Takes the blocks for the tokens of `row`; False, changing nothing, when there is no room for it yet."""
        number = -(-int(self._columns.length[row]) // self._block_size)
        if number + (0 if is_alone else self._watermark) > self.num_free:
            return False
        self._take(number)
        self._columns.blocks[row] = number
        return True

    def free(self, rows: IntArray) -> None:
        self.num_free += int(self._columns.blocks[rows].sum())
        self._columns.blocks[rows] = 0

    def grow(self, rows: IntArray) -> tuple[bool, int]:
        """Gives `rows`, the oldest first, the blocks of their committed tokens.

        Returns whether that was possible without taking any back, and how many rows have theirs: the others, the
        youngest, must be preempted.
        """
        blocks = self._columns.blocks
        needed = self.needed(self._columns.length[rows])
        missing = np.maximum(needed - blocks[rows], 0)
        total = int(missing.sum())
        if total <= self.num_free:
            blocks[rows] += missing
            self._take(total)
            return True, len(rows)
        # Blocks that were taken for drafts are given back first; then the youngest go, until it is enough.
        self.num_free += int(np.maximum(blocks[rows] - needed, 0).sum())
        blocks[rows] = np.minimum(blocks[rows], needed)
        num_kept = len(rows)
        while num_kept and int(missing[:num_kept].sum()) > self.num_free:
            num_kept -= 1
            self.free(rows[num_kept : num_kept + 1])
        blocks[rows[:num_kept]] += missing[:num_kept]
        self._take(int(missing[:num_kept].sum()))
        return False, num_kept

    def place(self, rows: IntArray, num_drafts: IntArray, *, may_grow: bool) -> IntArray:
        """How many of `num_drafts` there is room for after the tokens of `rows`; takes the blocks for them."""
        blocks, lengths = self._columns.blocks, self._columns.length[rows]
        held = blocks[rows]
        missing = np.maximum(self.needed(lengths + num_drafts) - held, 0)
        total = int(missing.sum())
        if not may_grow:
            missing[:] = 0
        elif total > self.num_free:
            before = np.cumsum(missing) - missing
            missing = np.clip(self.num_free - before, 0, missing)
        blocks[rows] = held + missing
        self._take(int(missing.sum()))
        placed: IntArray = np.minimum(num_drafts, (held + missing) * self._block_size - lengths)
        return placed

    def _take(self, number: int) -> None:
        self.num_free -= number
        self.most_used = max(self.most_used, self.num_blocks - self.num_free)
