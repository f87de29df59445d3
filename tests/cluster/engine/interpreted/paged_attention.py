"""Attention of the Triton kernel is that of its definition in float64, and a row's bits are its own."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from cluster.engine.batch import Batch, Segment, pack
from cluster.engine.gpu_kernels import paged_attention
from cluster.engine.gpu_kernels.paged_attention import PagedAttention
from tests.interpreter import spare_bookkeeping
from tests.interpreter_dot import dot_in_order
from tests.soak import IS_SOAK, length, only_in_soak

CPU = torch.device("cpu")
ALL = 2**31 - 1  # a span that no context exceeds
ERRORS = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
SHAPES = ((4, 4, 16), (6, 2, 24), (16, 2, 128))  # heads, those of keys and values, the size of one
RAGGED = [
    (dtype, *shape)
    for dtype, shape in itertools.product(ERRORS, SHAPES)
    if IS_SOAK or (dtype == torch.float32) != (shape == (6, 2, 24))
]


@dataclass
class Cache:
    """A layer's keys and values; what no sequence has is not a number, so that reading it shows."""

    block_size: int
    num_blocks: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        shape = (self.num_blocks * self.block_size, self.num_kv_heads, self.head_dim)
        generator = torch.Generator().manual_seed(1)
        self.contents = [torch.randn(shape, generator=generator).to(self.dtype) for _ in range(2)]
        self.keys, self.values = (torch.full(shape, torch.nan, dtype=self.dtype) for _ in range(2))
        self.free = random.Random(2).sample(range(self.num_blocks), self.num_blocks)  # tables have holes and no order

    def table(self, num_tokens: int) -> list[int]:
        """A block table of that many tokens, whose slots are numbers from now on."""
        table = [self.free.pop() for _ in range(-(-num_tokens // self.block_size))]
        slots = self.slots(table, torch.arange(num_tokens))
        self.keys[slots], self.values[slots] = (content[slots] for content in self.contents)
        return table

    def slots(self, table: Sequence[int], places: torch.Tensor) -> torch.Tensor:
        return torch.tensor(table)[places // self.block_size] * self.block_size + places % self.block_size

    def segment(self, num_rows: int, start: int, parents: Sequence[int] | None = None) -> Segment:
        return Segment([1] * num_rows, start, self.table(start + num_rows), num_rows, parents)


def queries(num_rows: int, num_heads: int, cache: Cache) -> torch.Tensor:
    """Returns queries of rows that also hold their keys and values, as in the engine."""
    generator = torch.Generator().manual_seed(num_rows)
    fused = torch.randn(num_rows, num_heads + 3, cache.head_dim, generator=generator)
    return fused.to(cache.dtype)[:, :num_heads]


def expected(query: torch.Tensor, cache: Cache, segments: Sequence[Segment], span: int) -> torch.Tensor:
    """Computes attention by its definition, in float64: [num_rows, num_heads, head_dim]."""
    group = query.shape[1] // cache.num_kv_heads
    attended, row = [], 0
    for segment in segments:
        paths = None if segment.parents is None else segment.paths()
        for index in range(len(segment.token_ids)):
            prefix = segment.num_computed_tokens
            if paths is None:
                position = prefix + index
                places = list(range(position + 1))[-span:]
            else:
                position = prefix + len(paths[index]) - 1
                places = [*range(prefix), *(prefix + node for node in paths[index])][-span:]
            slots = cache.slots(segment.block_table, torch.tensor(places))
            keys, values = (part[slots].double().repeat_interleave(group, dim=1) for part in (cache.keys, cache.values))
            scores = torch.einsum("hd,chd->hc", query[row].double(), keys) / math.sqrt(cache.head_dim)
            attended.append(torch.einsum("hc,chd->hd", scores.softmax(dim=-1), values))
            row += 1
    return torch.stack(attended)


def attend(query: torch.Tensor, cache: Cache, batch: Batch, span: int = ALL, *, may_split: bool = True) -> torch.Tensor:
    max_context = batch.block_tables.shape[1] * cache.block_size
    plan = PagedAttention(batch, cache.block_size, max_context, may_split=may_split)
    return plan.attend(query, cache.keys, cache.values, span)


def assert_right(
    cache: Cache, segments: Sequence[Segment], num_heads: int, span: int = ALL, *, may_split: bool = True
) -> None:
    batch = pack(segments, cache.block_size, CPU)
    query = queries(len(batch.token_ids), num_heads, cache)
    seen = attend(query, cache, batch, span, may_split=may_split)
    assert seen.dtype == cache.dtype
    wanted = expected(query, cache, segments, span)
    assert (seen.double() - wanted).abs().max() < ERRORS[cache.dtype] * max(1.0, float(wanted.abs().max()))


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    spare_bookkeeping(monkeypatch)
    dot_in_order(monkeypatch)


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention, "SPLIT", 64)


@pytest.mark.parametrize(("dtype", "num_heads", "num_kv_heads", "head_dim"), RAGGED)
@pytest.mark.usefixtures("short_splits")
def test_ragged_batches(dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    cache = Cache(16, 64, num_kv_heads, head_dim, dtype)
    shapes = [(1, 0), (1, 140), (7, 15), (18, 30), (1, 63), (1, 64)]
    for may_split in (False, True):
        cache = Cache(16, 64, num_kv_heads, head_dim, dtype)
        assert_right(cache, [cache.segment(*shape) for shape in shapes], num_heads, may_split=may_split)


@pytest.mark.parametrize("block_size", length((12,), (1, 4, 12, 16, 128)))
def test_contexts_end_at_the_borders_of_blocks_and_steps(block_size: int) -> None:
    cache = Cache(block_size, 4 * (2048 // block_size), 2, 16)
    assert_right(cache, [cache.segment(1, end - 1) for end in (1, 2, 31, 32, 33, 64, 65, 127, 128, 129)], 4)


@pytest.mark.parametrize("span", length((33,), (1, 5, 33, 64, 70, 300)))
@pytest.mark.usefixtures("short_splits")
def test_windows(span: int) -> None:
    for may_split in (False, True):
        cache = Cache(8, 128, 2, 16)
        segments = [cache.segment(*shape) for shape in ((1, 250), (6, 64), (70, 0), (1, 3))]
        segments.append(cache.segment(5, 130, [-1, 0, 0, 2, 1]))
        assert_right(cache, segments, 4, span, may_split=may_split)


@pytest.mark.parametrize("seed", range(length(1, 3)))
@pytest.mark.usefixtures("short_splits")
def test_trees_among_chains(seed: int) -> None:
    rng = random.Random(seed)
    for may_split in (False, True):
        cache = Cache(16, 256, 2, 16)
        segments = []
        for index in range(5):
            num_rows, start = rng.randint(1, 70 if index == 0 else 12), rng.randint(0, 200)
            parents = [-1, *(rng.randrange(node) for node in range(1, num_rows))] if index % 3 != 1 else None
            segments.append(cache.segment(num_rows, start, parents))
        assert_right(cache, segments, 4, may_split=may_split)


def test_a_tree_that_grows() -> None:
    """The step computes some of the nodes; their ancestors are in the cache."""
    cache = Cache(16, 16, 2, 16)
    parents = [-1, -1, 0, 0, 1, 2, 4]
    table = cache.table(40 + len(parents))
    assert_right(cache, [Segment([1, 1, 1], 40, table, 3, parents, [3, 5, 6]), cache.segment(1, 9)], 4)


@only_in_soak
def test_one_long_context_beside_short_ones() -> None:
    cache = Cache(16, 2100, 1, 16)
    segments = [cache.segment(1, 5), cache.segment(2, 32_700), cache.segment(1, 70)]
    assert_right(cache, segments, 2)


def test_a_prompts_chunk_after_others() -> None:
    cache = Cache(16, 128, 2, 16)
    assert_right(cache, [cache.segment(60, 1100), cache.segment(1, 20), cache.segment(40, 0)], 4)


@pytest.mark.parametrize("dtype", length((torch.bfloat16,), tuple(ERRORS)))
@pytest.mark.usefixtures("short_splits")
def test_a_rows_bits_are_its_own(dtype: torch.dtype) -> None:
    """Alone or among others, as a decode or in a chunk, with its splits walked by one program or by several."""
    cache = Cache(16, 128, 2, 16, dtype)
    chunk = cache.segment(30, 90)
    others = [cache.segment(*shape) for shape in ((1, 7), (9, 130), (13, 0))]
    num_heads = 6
    own = queries(30, num_heads, cache)
    alone = attend(own, cache, pack([chunk], 16, CPU))
    for segments in ([*others, chunk], [others[2], chunk, others[1]]):
        batch = pack(segments, 16, CPU)
        first = int(batch.row_starts[segments.index(chunk)])
        query = queries(len(batch.token_ids), num_heads, cache)
        query[first : first + 30] = own
        for may_split in (False, True):
            seen = attend(query, cache, batch, may_split=may_split)
            assert torch.equal(seen[first : first + 30], alone)
    for row in length((11,), (0, 11, 29)):
        decode = Segment([1], 90 + row, chunk.block_table, 1)
        for may_split in (False, True):
            seen = attend(own[row : row + 1], cache, pack([decode], 16, CPU), may_split=may_split)
            assert torch.equal(seen[0], alone[row])


@pytest.mark.usefixtures("short_splits")
def test_a_node_of_a_tree_has_the_bits_of_a_chain() -> None:
    """Its path's slots lie in their order, which a tree of one path is."""
    cache = Cache(16, 32, 2, 16)
    chain = cache.segment(6, 100)
    tree = Segment(chain.token_ids, 100, chain.block_table, 6, [-1, 0, 1, 2, 3, 4])
    query = queries(6, 4, cache)
    assert torch.equal(attend(query, cache, pack([tree], 16, CPU)), attend(query, cache, pack([chain], 16, CPU)))
