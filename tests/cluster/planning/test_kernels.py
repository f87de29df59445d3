"""Bytes and operations of kernels against arithmetic by hand."""

from __future__ import annotations

import pytest

from cluster.engine.memory_plan import PlannedModel
from cluster.planning.kernels import Segments, attention, burst_step, linears, sampling, step_kernels

_7B, _70B = PlannedModel.parse("7B"), PlannedModel.parse("70B")
_KV_70B = 327_680  # bytes of a token: 2 * 80 layers * 8 heads * 128 * 2


def test_linears_read_the_weights_whatever_the_rows() -> None:
    assert linears(_70B, 1).num_bytes == linears(_70B, 512).num_bytes == 140e9
    assert linears(_70B, 512).num_operations == 2 * 70e9 * 512


def test_a_tile_of_eight_query_heads_a_kv_head_has_four_rows() -> None:
    # six rows are two tiles: the first reads up to 1,004 positions, the second up to 1,006
    own = attention(_70B, (Segments(1, 6, 1000),))
    assert own.num_bytes == (1004 + 1006) * _KV_70B
    assert own.bytes_once == 1006 * _KV_70B
    # rows see 1,001 to 1,006 positions: 6,021; 4 * 80 layers * 64 heads * 128 each
    assert own.num_operations == 4 * 80 * 64 * 128 * 6021


def test_without_grouped_queries_it_has_32() -> None:
    own = attention(_7B, (Segments(3, 6, 1000), Segments(1, 33, 0)))
    # KV of a token: 2 * 32 layers * 32 heads * 128 * 2; of the 33 rows the last is a tile of its own
    assert own.num_bytes == (3 * 1006 + 32 + 33) * 2 * 32 * 32 * 128 * 2


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8, 64, 100])
@pytest.mark.parametrize("cached", [0, 7, 1000])
def test_positions_are_those_that_are_counted(rows: int, cached: int) -> None:
    segments = Segments(2, rows, cached)
    ends = [min(first + 4, rows) for first in range(0, rows, 4)]
    assert segments.positions_read(4) == 2 * sum(cached + end for end in ends)
    assert segments.positions_seen == 2 * sum(cached + row + 1 for row in range(rows))


def test_rows_that_were_shared_out_take_no_tile_more() -> None:
    assert Segments(7, 7 * 4 * (1 / 7), 0).positions_read(4) == pytest.approx(7 * 4)


def test_where_heads_are_not_known_kv_is_read_once() -> None:
    model = PlannedModel.parse("34B/48x8x128")
    own = attention(model, (Segments(1, 64, 1000),))
    assert own.num_bytes == own.bytes_once == 1064 * 2 * 48 * 8 * 128 * 2
    assert own.num_operations == sampling(model, 64).num_bytes == 0


def test_the_sampler_reads_the_logits_of_sampled_rows() -> None:
    # 16 rows that are verified and of a prompt the last, 128,256 float32 each
    *_, own = step_kernels(_70B, (Segments(4, 4, 100), Segments(1, 512, 0, sampled_rows=1)))
    assert own.num_bytes == 17 * 128_256 * 4
    assert not own.is_sharded
    assert sampling(_70B, 1, logit_passes=3).num_bytes == 3 * sampling(_70B, 1).num_bytes


def test_a_burst_is_k_of_its_mean_step() -> None:
    steps = [attention(_70B, (Segments(5, 1, 100 + i),)).num_bytes for i in range(4)]
    assert 4 * attention(_70B, burst_step(5, 100, 4)).num_bytes == sum(steps)
