"""Invariants of blocks, asserted after every step of a test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from cluster.engine.blocks import BlockManager


def num_free_blocks(blocks: BlockManager) -> int:
    """Those that are neither used nor cached."""
    return blocks.num_blocks - blocks.num_used_blocks - blocks.num_cached_blocks


def assert_blocks_are_sound(blocks: BlockManager, block_tables: Collection[Sequence[int]]) -> None:
    """Every block is free, cached or in the tables; only known beginnings are in several."""
    owners = Counter(block for table in block_tables for block in table)
    assert all(len(set(table)) == len(table) for table in block_tables), "a sequence owns a block twice"
    assert blocks._num_owners == [owners[block] for block in range(blocks.num_blocks)]
    free, cached = set(blocks._free), set(blocks._cached)
    assert len(free) == len(blocks._free)
    assert not free & cached
    assert not (free | cached) & owners.keys()
    assert blocks.num_used_blocks == len(owners)
    assert len(free) + len(cached) + len(owners) == blocks.num_blocks

    hash_of, block_of = blocks._hash_of, blocks._block_of
    for table in block_tables:
        hashes = [hash_of[block] for block in table]
        assert None not in hashes[: sum(digest is not None for digest in hashes)], "known blocks after an unknown one"
    for block, num_owners in owners.items():
        if num_owners > 1:
            assert hash_of[block] is not None, "a block that is not known has two owners"
            places = {table.index(block) for table in block_tables if block in table}
            assert len(places) == 1, "a block is shared in different places"
    assert all(hash_of[block] is None for block in free)
    assert all(block_of[hash_of[block]] == block for block in cached)
    assert all(hash_of[block] == digest for digest, block in block_of.items())
