from __future__ import annotations

import random

import pytest

from cluster.engine.blocks import BlockManager

from .invariants import assert_blocks_are_owned_once


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_a_partly_filled_block_is_a_whole_block(num_tokens: int, num_blocks: int) -> None:
    assert BlockManager(8, 16).num_blocks_for(num_tokens) == num_blocks


def test_a_lone_sequence_gets_neighbours() -> None:
    assert BlockManager(8, 16).allocate(3) == [0, 1, 2]


def test_no_block_ever_has_two_owners() -> None:
    choose = random.Random(0)
    blocks = BlockManager(37, 4)
    tables: list[list[int]] = []
    for _ in range(2000):
        if tables and choose.random() < 0.5:
            blocks.free(tables.pop(choose.randrange(len(tables))))
        else:
            wanted = choose.randrange(12)
            is_enough = wanted <= blocks.num_free_blocks
            table = blocks.allocate(wanted)
            assert (table is not None) == is_enough
            if table is not None:
                assert len(table) == wanted
                tables.append(table)
        assert_blocks_are_owned_once(blocks, tables)
    for table in tables:
        blocks.free(table)
    assert_blocks_are_owned_once(blocks, [])
    assert sorted(blocks.allocate(37) or []) == list(range(37))


def test_an_allocation_that_fails_changes_nothing() -> None:
    blocks = BlockManager(4, 16)
    held = blocks.allocate(2)
    assert blocks.allocate(3) is None
    assert blocks.num_free_blocks == 2
    rest = blocks.allocate(2)
    assert held is not None
    assert rest is not None
    assert_blocks_are_owned_once(blocks, [held, rest])


def test_freeing_empties_the_table() -> None:
    blocks = BlockManager(4, 16)
    table = blocks.allocate(2)
    assert table is not None
    blocks.free(table)
    assert table == []
    blocks.free(table)  # an empty table: nothing to free
    assert blocks.num_free_blocks == 4


def test_freeing_twice_is_our_mistake() -> None:
    blocks = BlockManager(4, 16)
    table = blocks.allocate(2)
    assert table is not None
    copy = list(table)
    blocks.free(table)
    with pytest.raises(AssertionError, match="twice"):
        blocks.free(copy)
