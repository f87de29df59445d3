"""What must hold of blocks whatever happened, asserted after every step of a test."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cluster.engine.blocks import BlockManager


def assert_blocks_are_owned_once(blocks: BlockManager, block_tables: Iterable[Sequence[int]]) -> None:
    """The tables share no block, and together they are exactly what is in use."""
    owned = [block for table in block_tables for block in table]
    assert len(owned) == len(set(owned)), "a block has two owners"
    assert all(0 <= block < blocks.num_blocks for block in owned)
    assert blocks.num_used_blocks == len(owned)
    assert blocks.num_free_blocks == blocks.num_blocks - len(owned)
