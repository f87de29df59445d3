"""Division of products into programs. Imports neither torch nor Triton, because memory is planned without them."""

from __future__ import annotations

from dataclasses import dataclass

_MOST_PARTS = 8
_PROGRAMS = (
    128  # enough programs to fill a GPU of about 132 multiprocessors; constant, because it determines the order of sums
)
_COLUMNS = 128  # outputs per program, for the choice of the number of parts
_LEAST_INPUTS = 256  # minimum inputs of a part


@dataclass(frozen=True, slots=True)
class Tile:
    """Size of one program's part of a product, and its compile options. No bit of a result depends on the tile."""

    num_rows: int
    num_columns: int  # outputs
    num_warps: int
    num_stages: int  # blocks of inputs in flight, including the one being multiplied

    def count(self, num_rows: int, num_outputs: int) -> int:
        """Returns the number of tiles of a product."""
        return -(-num_rows // self.num_rows) * -(-num_outputs // self.num_columns)


# Tiles by bytes per value, from few rows to many. `_ROWS` has the limits; the last tile is for all larger numbers.
TILES = {
    2: (Tile(16, 64, 4, 8), Tile(64, 128, 4, 4), Tile(128, 128, 8, 3)),
    4: (Tile(16, 32, 4, 3), Tile(32, 32, 4, 3), Tile(64, 64, 8, 2)),
}
_ROWS = (16, 64)  # maximum number of rows for the first and second tiles
BLOCKS = {2: 64, 4: 32}
"Inputs that are multiplied at once, by bytes per value. It decides the order of sums, so all tiles share it."


def choose_tile(num_rows: int, value_bytes: int) -> Tile:
    """Returns the tile of a product of `num_rows` rows."""
    index = sum(num_rows > most for most in _ROWS)
    return TILES[value_bytes][index]


def num_parts(num_outputs: int, num_inputs: int) -> int:
    """Returns the number of parts into which the inputs are cut: 1, 2, 4 or 8.

    With a program for each part, even a product with few rows fills a GPU. The number depends only on the shape of the
    weight, so that different GPUs sum in the same order.
    """
    parts, columns = 1, -(-num_outputs // _COLUMNS)
    while parts < _MOST_PARTS and parts * columns < _PROGRAMS and num_inputs >= 2 * parts * _LEAST_INPUTS:
        parts *= 2
    return parts


def uses_programs_of_parts(tile: Tile, num_rows: int, num_outputs: int, parts: int) -> bool:
    """Returns True if each part gets its own program, because there are too few tiles to fill a GPU."""
    return parts > 1 and tile.count(num_rows, num_outputs) < _PROGRAMS


def part_sums_bytes(num_rows: int, num_outputs: int, num_inputs: int, value_bytes: int) -> int:
    """Returns the bytes of the partial sums; 0 if one program sums all parts of a tile."""
    parts, tile = num_parts(num_outputs, num_inputs), choose_tile(num_rows, value_bytes)
    is_split = uses_programs_of_parts(tile, num_rows, num_outputs, parts)
    return 4 * parts * num_rows * num_outputs * is_split
