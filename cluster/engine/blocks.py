"""Which blocks of the KV cache are free."""

from __future__ import annotations


class BlockManager:
    """Hands out fixed-size blocks of the KV cache, each to one owner at a time."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Taken from the end, so that low block numbers go first and a lone sequence gets neighbours.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._is_free = [True] * num_blocks

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """A block table of `num_blocks` blocks, or None, changing nothing, when fewer are free."""
        if num_blocks > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(num_blocks)]
        for block in blocks:
            self._is_free[block] = False
        return blocks

    def free(self, block_table: list[int]) -> None:
        """Takes back a block table and empties it."""
        for block in reversed(block_table):
            assert not self._is_free[block], f"block {block} freed twice"
            self._is_free[block] = True
            self._free.append(block)
        block_table.clear()
