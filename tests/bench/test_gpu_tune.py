"""Choice of tiles without a GPU, and the file that engines read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.gpu_tune import fastest
from cluster.engine.gpu_kernels import product_tiles
from cluster.engine.gpu_kernels.product_tiles import TILES, Tile, choose_tile, use_tiles
from cluster.errors import ConfigurationError

BEFORE, FAST, SLOW, TOO_LARGE = Tile(16, 64, 4, 8), Tile(16, 32, 4, 4), Tile(16, 128, 8, 4), Tile(16, 256, 8, 8)
MICROSECONDS = {BEFORE: {1: 10.0, 16: 100.0}, FAST: {1: 5.0, 16: 110.0}, SLOW: {1: 11.0, 16: 99.0}}


def time(tile: Tile, height: int) -> float:
    if tile == TOO_LARGE:
        raise RuntimeError("out of resource: shared memory")
    return MICROSECONDS[tile][height]


def test_heights_count_alike_and_what_cannot_run_is_left_out() -> None:
    """At 1 row FAST saves half; at 16 rows SLOW saves a microsecond more."""
    tile, ratio = fastest([SLOW, TOO_LARGE, FAST], (1, 16), time, BEFORE)
    assert (tile, ratio) == (FAST, pytest.approx(0.8))
    assert fastest([SLOW, TOO_LARGE], (1, 16), time, BEFORE) == (BEFORE, 1.0)


def test_products_use_the_tiles_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_tiles, "_used_tiles", dict(TILES))
    file = tmp_path / "tiles.json"
    file.write_text(json.dumps({"gpu": "A10G", "tiles": [[16, 32, 2, 4], [32, 64, 4, 3], [64, 128, 8, 2]]}))
    use_tiles(file)
    assert [choose_tile(rows, 2) for rows in (16, 17, 65)] == [
        Tile(16, 32, 2, 4),
        Tile(32, 64, 4, 3),
        Tile(64, 128, 8, 2),
    ]
    assert choose_tile(16, 4) == TILES[4][0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"tiles": 3}',
        '{"tiles": [[16, 32, 2, 4]]}',
        '{"tiles": [[16, 33, 2, 4], [32, 64, 4, 3], [64, 128, 8, 2]]}',
    ],
)
def test_another_file_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "tiles.json"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=r"product_tiles .*tiles.json: .*write it with bench.gpu_tune"):
        use_tiles(file)
    with pytest.raises(ConfigurationError, match="product_tiles"):
        use_tiles(tmp_path / "missing.json")
