"""Division of products into programs. Imports neither torch nor Triton, as memory is planned without them."""

from __future__ import annotations

from dataclasses import dataclass

_MOST_PARTS = 8
_PROGRAMS = (
    128  # fewer programs do not fill a GPU of about 132 multiprocessors; a constant, as it decides the order of sums
)
_COLUMNS = 128  # outputs per program, for the choice of the number of parts
_LEAST_INPUTS = 256  # inputs of a part


@dataclass(frozen=True, slots=True)
class Tile:
    """Share of one program, and its compile options. No bit of a result depends on it."""

    num_rows: int
    num_columns: int  # outputs
    num_warps: int
    num_stages: int  # blocks of inputs in flight, including the one being multiplied

    def count(self, num_rows: int, num_outputs: int) -> int:
        """Returns the number of tiles of a product."""
        return -(-num_rows // self.num_rows) * -(-num_outputs // self.num_columns)


# By bytes per value, from few rows to many. The last entry is for all larger counts.
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

    It lets programs of one part each fill a GPU. It depends on the shape of the weight alone, not on the GPU, so that
    different GPUs sum in one order.
    """
    parts, columns = 1, -(-num_outputs // _COLUMNS)
    while parts < _MOST_PARTS and parts * columns < _PROGRAMS and num_inputs >= 2 * parts * _LEAST_INPUTS:
        parts *= 2
    return parts


def uses_programs_of_parts(tile: Tile, num_rows: int, num_outputs: int, parts: int) -> bool:
    """Returns True if each part gets its own program, because there are too few tiles to fill a GPU."""
    return parts > 1 and tile.count(num_rows, num_outputs) < _PROGRAMS


def part_sums_bytes(num_rows: int, num_outputs: int, num_inputs: int, value_bytes: int) -> int:
    """Returns the bytes of the sums that the programs of parts write; 0 if one program sums all parts."""
    parts, tile = num_parts(num_outputs, num_inputs), choose_tile(num_rows, value_bytes)
    is_split = uses_programs_of_parts(tile, num_rows, num_outputs, parts)
    return 4 * parts * num_rows * num_outputs * is_split
