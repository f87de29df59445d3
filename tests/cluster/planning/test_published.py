"""Compares the reference's published figures with the limits of its GPUs."""

from __future__ import annotations

import pytest

from cluster.planning.published import checked_table
from cluster.planning.report import published_table


def test_what_lies_below_the_bandwidth_floor_is_marked() -> None:
    rows = {row.published.name: row for row in checked_table()}
    assert {name for name, row in rows.items() if row.is_below_bandwidth_floor} == {
        "70B standard, 4xA100",
        "70B + 7B, K=5, 4xA100 + 4xA10G",
        "70B standard, 4xH100",
    }
    # 140 GB / (4 * 2,039 GB/s) = 17.17 ms, and 12.5 were published
    assert rows["70B standard, 4xA100"].floor.ms_per_token == pytest.approx(17.165, rel=1e-3)
    # five tokens of 14 GB / 600 GB/s = 23.33 ms are 116.7 ms; E = (1 - 0.78^6) / 0.22 = 3.522: 33.1 ms, and not 6.8
    drafted = rows["70B + 7B, K=5, 4xA100 + 4xA10G"].floor
    assert drafted.draft_token_ms == pytest.approx(23.33, rel=1e-3)
    assert drafted.ms_per_token == pytest.approx(33.13, rel=1e-3)
    # seven of 2 GB / 600 GB/s = 23.3 ms; E = (1 - 0.82^8) / 0.18 = 4.420: 5.28 ms, just under the published 5.4
    assert rows["70B + distilled 1B, K=7, 4xA100 + 1xA10G"].floor.ms_per_token == pytest.approx(5.279, rel=1e-3)


def test_what_lies_above_peak_compute_is_marked() -> None:
    rows = {row.published.name: row for row in checked_table()}
    # 4 * 312e12 / (2 * 70e9 * 6 rows / 3.522 tokens) = 5,232 tokens/s, and 9,850 were published
    assert rows["70B + 7B, K=5, 4xA100 + 4xA10G"].floor.tokens_per_second == pytest.approx(5232, rel=1e-3)
    assert [row.is_above_peak_compute for row in rows.values()] == [False, True, True, True, False]


def test_the_marks_are_in_the_table_and_explained() -> None:
    lines = published_table(checked_table()).splitlines()
    assert "6.8*" in lines[2]
    assert "9850+" in lines[2]
    assert "5.4 " in lines[3]
    assert any("below the bandwidth floor" in line for line in lines)
