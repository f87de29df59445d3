from __future__ import annotations

import random
from collections.abc import MutableSequence

import pytest

from cluster.engine.blocks import BlockManager

from .invariants import assert_blocks_are_sound, num_free_blocks


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_a_partly_filled_block_is_a_whole_block(num_tokens: int, num_blocks: int) -> None:
    assert BlockManager(8, 16).num_blocks_for(num_tokens) == num_blocks


def test_a_lone_sequence_gets_neighbours() -> None:
    assert list(BlockManager(8, 16).allocate(3) or []) == [0, 1, 2]


def test_without_a_common_beginning_no_block_ever_has_two_owners() -> None:
    choose = random.Random(0)
    blocks = BlockManager(37, 4)
    tables: list[MutableSequence[int]] = []
    for _ in range(2000):
        if tables and choose.random() < 0.5:
            blocks.free(tables.pop(choose.randrange(len(tables))))
        else:
            wanted = choose.randrange(12)
            is_enough = wanted <= blocks.num_available_blocks
            table = blocks.allocate(wanted)
            assert (table is not None) == is_enough
            if table is not None:
                assert len(table) == wanted
                tables.append(table)
        assert_blocks_are_sound(blocks, tables)
    for table in tables:
        blocks.free(table)
    assert_blocks_are_sound(blocks, [])
    assert sorted(blocks.allocate(37) or []) == list(range(37))


def test_an_allocation_that_fails_changes_nothing() -> None:
    blocks = BlockManager(4, 16)
    held = blocks.allocate(2)
    assert blocks.allocate(3) is None
    assert num_free_blocks(blocks) == 2
    rest = blocks.allocate(2)
    assert held is not None
    assert rest is not None
    assert_blocks_are_sound(blocks, [held, rest])


def test_freeing_empties_the_table() -> None:
    blocks = BlockManager(4, 16)
    table = blocks.allocate(2)
    assert table is not None
    blocks.free(table)
    assert not table
    blocks.free(table)  # an empty table: nothing to free
    assert num_free_blocks(blocks) == 4


def test_freeing_twice_is_our_mistake() -> None:
    blocks = BlockManager(4, 16)
    table = blocks.allocate(2)
    assert table is not None
    copy = list(table)
    blocks.free(table)
    with pytest.raises(AssertionError, match="twice"):
        blocks.free(copy)


def test_a_table_grows_and_shrinks_by_whole_blocks() -> None:
    blocks = BlockManager(4, 4)
    table: list[int] = []
    assert blocks.grow(table, 5)
    assert list(table) == [0, 1]
    assert blocks.grow(table, 3)  # it has room for more already
    assert blocks.grow(table, 8)
    assert list(table) == [0, 1]
    assert not blocks.grow(table, 17)
    assert list(table) == [0, 1]
    assert blocks.grow(table, 16)
    blocks.shrink(table, 4)
    assert list(table) == [0]
    assert_blocks_are_sound(blocks, [table])


TOKENS = list(range(100, 140))


def computed(blocks: BlockManager, token_ids: list[int]) -> list[int]:
    """The table of a sequence whose tokens are all committed and computed."""
    allocated = blocks.allocate_for(token_ids, len(token_ids))
    assert allocated is not None
    blocks.cache(allocated[0], token_ids, len(token_ids))
    return allocated[0]


def num_cached(blocks: BlockManager, token_ids: list[int]) -> int:
    """How many of `token_ids` a new sequence would not have to compute."""
    allocated = blocks.allocate_for(token_ids, len(token_ids))
    assert allocated is not None
    blocks.free(allocated[0])
    return allocated[1]


class TestPrefixes:
    @pytest.mark.parametrize(
        ("token_ids", "num_shared"),
        [
            (TOKENS[:10], 8),  # the third block is not full
            (TOKENS[:9], 8),
            (TOKENS[:8], 4),  # the last token is computed again
            (TOKENS[:4], 0),
            (TOKENS[:1], 0),
            (TOKENS[:12], 8),
            (TOKENS[:40], 8),
            ([*TOKENS[:7], 1, *TOKENS[8:12]], 4),
            ([1, *TOKENS[1:12]], 0),
            ([*TOKENS[4:8], *TOKENS[:4], 1], 0),  # a hash is of all tokens before it, too
            (TOKENS[4:12], 0),
        ],
    )
    def test_full_blocks_of_the_same_beginning_are_shared(self, token_ids: list[int], num_shared: int) -> None:
        blocks = BlockManager(32, 4)
        first = computed(blocks, TOKENS[:11])
        allocated = blocks.allocate_for(token_ids, len(token_ids))
        assert allocated is not None
        second, num_computed = allocated
        assert num_computed == num_shared
        assert len(second) == blocks.num_blocks_for(len(token_ids))
        assert second[: num_shared // 4] == first[: num_shared // 4]
        assert_blocks_are_sound(blocks, [first, second])
        blocks.free(first)
        assert_blocks_are_sound(blocks, [second])
        blocks.free(second)
        assert_blocks_are_sound(blocks, [])

    def test_they_are_found_after_their_owner_is_gone(self) -> None:
        blocks = BlockManager(8, 4)
        first = computed(blocks, TOKENS[:11])
        was = list(first)
        blocks.free(first)
        assert (blocks.num_used_blocks, blocks.num_cached_blocks, num_free_blocks(blocks)) == (0, 2, 6)
        allocated = blocks.allocate_for(TOKENS[:11], 11)
        assert allocated is not None
        assert (list(allocated[0][:2]), allocated[1]) == (was[:2], 8)
        assert (blocks.num_used_blocks, blocks.num_cached_blocks, num_free_blocks(blocks)) == (3, 0, 5)

    def test_only_what_is_committed_and_computed_is_shared(self) -> None:
        """The rest of the table may hold anything: drafts, or nothing yet."""
        blocks = BlockManager(8, 4)
        allocated = blocks.allocate_for(TOKENS[:16], 20)
        assert allocated is not None
        blocks.cache(allocated[0], TOKENS[:16], 7)
        assert num_cached(blocks, TOKENS[:16]) == 4
        blocks.cache(allocated[0], TOKENS[:16], 12)
        assert num_cached(blocks, TOKENS[:16]) == 12
        assert_blocks_are_sound(blocks, [allocated[0]])

    def test_a_sequence_grows_past_its_shared_beginning_on_blocks_of_its_own(self) -> None:
        blocks = BlockManager(16, 4)
        tables = [computed(blocks, [*TOKENS[:8], *[end] * 6]) for end in range(3)]
        assert len({tuple(table[:2]) for table in tables}) == 1
        assert len({block for table in tables for block in table[2:]}) == 6
        assert_blocks_are_sound(blocks, tables)

    def test_when_two_computed_the_same_one_copy_is_kept(self) -> None:
        blocks = BlockManager(8, 4)
        tables = [blocks.allocate(2), blocks.allocate(2)]
        for table in tables:
            assert table is not None
            blocks.cache(table, TOKENS, 8)
            assert_blocks_are_sound(blocks, [t for t in tables if t is not None])
        for table in tables:
            assert table is not None
            blocks.free(table)
        assert (blocks.num_cached_blocks, num_free_blocks(blocks)) == (2, 6)
        assert num_cached(blocks, TOKENS[:9]) == 8

    def test_when_the_copy_that_is_found_was_evicted_the_other_takes_its_place(self) -> None:
        blocks = BlockManager(4, 4)
        first, second = blocks.allocate(1), blocks.allocate(1)
        assert first is not None
        assert second is not None
        blocks.cache(first, TOKENS, 4)
        blocks.cache(second, TOKENS, 4)
        blocks.free(first)
        others = blocks.allocate(3)
        assert num_cached_blocks(blocks, TOKENS[:5]) == 0
        blocks.free(second)
        assert_blocks_are_sound(blocks, [others or []])
        assert num_cached_blocks(blocks, TOKENS[:5]) == 1

    def test_it_can_be_switched_off(self) -> None:
        blocks = BlockManager(8, 4, enable_prefix_caching=False)
        blocks.free(computed(blocks, TOKENS[:12]))
        assert (blocks.num_cached_blocks, num_free_blocks(blocks)) == (0, 8)
        assert num_cached(blocks, TOKENS[:12]) == 0

    def test_tokens_are_counted_once_a_sequence_has_room(self) -> None:
        blocks = BlockManager(4, 4)
        blocks.free(computed(blocks, TOKENS[:9]))
        assert blocks.allocate_for(TOKENS[:20], 20) is None
        held = computed(blocks, TOKENS[:12])
        assert (blocks.num_queried_tokens, blocks.num_hit_tokens) == (9 + 12, 8)
        readings = {reading.name: reading.value for reading in blocks.readings()}
        assert readings == {
            "outrider_kv_blocks": 4,
            "outrider_kv_blocks_used": len(held),
            "outrider_kv_blocks_cached": 0,
            "vllm:prefix_cache_queries": 21,
            "vllm:prefix_cache_hits": 8,
        }


class TestEviction:
    def test_free_blocks_go_first_then_what_was_given_back_first_each_sequence_from_its_end(self) -> None:
        blocks = BlockManager(8, 4)
        first, second = computed(blocks, TOKENS[:8]), computed(blocks, TOKENS[20:28])
        order = [*reversed(second), *reversed(first)]
        blocks.free(second)
        blocks.free(first)
        taken = [block for _ in range(8) for block in blocks.allocate(1) or []]
        assert taken[4:] == order
        assert_blocks_are_sound(blocks, [taken])

    def test_what_is_used_again_goes_last(self) -> None:
        blocks = BlockManager(4, 4)
        first, second = computed(blocks, TOKENS[:8]), computed(blocks, TOKENS[20:28])
        blocks.free(first)
        blocks.free(second)
        assert num_cached(blocks, TOKENS[:5]) == 4  # evicts the end of the first, then gives its beginning back
        evicted = blocks.allocate(3)
        assert evicted is not None
        assert num_cached_blocks(blocks, TOKENS[:5]) == 1
        assert num_cached_blocks(blocks, TOKENS[20:28]) == 0
        assert_blocks_are_sound(blocks, [evicted])

    def test_an_evicted_prefix_is_not_found_and_can_be_cached_anew(self) -> None:
        blocks = BlockManager(4, 4)
        blocks.free(computed(blocks, TOKENS[:13]))
        other = blocks.allocate(4)
        assert other is not None
        blocks.free(other)
        assert num_cached(blocks, TOKENS[:13]) == 0
        blocks.free(computed(blocks, TOKENS[:13]))
        assert num_cached(blocks, TOKENS[:13]) == 12

    def test_when_a_beginning_is_evicted_what_follows_is_found_again_with_it(self) -> None:
        blocks = BlockManager(6, 4)
        beginning, rest = blocks.allocate(1), blocks.allocate(1)
        assert beginning is not None
        assert rest is not None
        blocks.cache([*beginning, *rest], TOKENS, 8)
        blocks.free(beginning)
        blocks.free(rest)
        others = blocks.allocate(5)  # evicts the beginning alone
        assert others is not None
        assert num_cached_blocks(blocks, TOKENS[:9]) == 0
        blocks.cache(others[:1], TOKENS, 4)
        assert num_cached_blocks(blocks, TOKENS[:9]) == 2
        assert_blocks_are_sound(blocks, [others])

    def test_what_a_new_sequence_shares_is_not_evicted_for_it(self) -> None:
        blocks = BlockManager(4, 4)
        blocks.free(computed(blocks, TOKENS[:12]))
        held = blocks.allocate(1)
        assert held is not None
        assert blocks.allocate_for(TOKENS[:16], 16) is None  # 3 shared, 1 more, and only those 3 are there
        assert blocks.num_cached_blocks == 3
        blocks.free(held)
        allocated = blocks.allocate_for(TOKENS[:16], 16)
        assert allocated is not None
        assert allocated[1] == 12
        assert_blocks_are_sound(blocks, [allocated[0]])

    def test_a_reserve_stays_available(self) -> None:
        blocks = BlockManager(4, 4)
        assert blocks.allocate_for(TOKENS[:12], 12, reserve=2) is None
        assert blocks.allocate_for(TOKENS[:12], 12, reserve=1) is not None
        assert blocks.allocate_for(TOKENS[:1], 1, reserve=1) is None
        assert num_free_blocks(blocks) == 1


def num_cached_blocks(blocks: BlockManager, token_ids: list[int]) -> int:
    """Like `num_cached`, in blocks, and without taking any."""
    return len(blocks.cached_prefix(token_ids))


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_every_block_is_accounted_for_and_a_shared_one_holds_what_it_should(seed: int) -> None:
    """Sequences over three tokens, so that beginnings coincide; `contents` is what a block really holds."""
    choose = random.Random(seed)
    blocks = BlockManager(choose.choice([7, 16, 40]), choose.choice([1, 2, 4]))
    size = blocks.block_size
    contents: dict[int, list[int]] = {}
    sequences: list[tuple[list[int], list[int], int]] = []  # (tokens, table, computed)
    num_hits = 0
    for _ in range(1500):
        action = choose.random()
        if action < 0.35:
            token_ids = [choose.randrange(3) for _ in range(choose.randint(1, 12))]
            allocated = blocks.allocate_for(token_ids, len(token_ids) + choose.randint(0, 3))
            if allocated is not None:
                table, num_computed = allocated
                num_hits += num_computed
                assert num_computed < len(token_ids)
                for index in range(num_computed // size):
                    assert contents[table[index]] == token_ids[: (index + 1) * size]
                sequences.append((token_ids, table, num_computed))
        elif action < 0.75 and sequences:
            index = choose.randrange(len(sequences))
            token_ids, table, num_computed = sequences[index]
            token_ids.append(choose.randrange(3))
            if blocks.grow(table, len(token_ids)):
                num_computed = choose.randint(num_computed, len(token_ids))
                for place in range(sequences[index][2] // size, -(-num_computed // size)):
                    contents[table[place]] = token_ids[: min((place + 1) * size, num_computed)]
                blocks.cache(table, token_ids, num_computed)
                sequences[index] = token_ids, table, num_computed
        elif action < 0.8 and sequences:
            token_ids, table, num_computed = choose.choice(sequences)
            blocks.shrink(table, len(token_ids))
        elif sequences:
            blocks.free(sequences.pop(choose.randrange(len(sequences)))[1])
        assert_blocks_are_sound(blocks, [table for _, table, _ in sequences])
    assert num_hits > 0
    for _, table, _ in sequences:
        blocks.free(table)
    assert_blocks_are_sound(blocks, [])
    assert blocks.num_used_blocks == 0
