"""Division of attention into programs. Imports neither torch nor Triton, as memory is planned without them."""

from __future__ import annotations

TILE = 32  # queries that share a reading: rows of one segment times query heads of one KV head
SPLIT = 512  # positions; a constant, as it decides the order of sums
PARTS = 32  # programs that share the splits of a tile
_FULL = 256  # tiles times KV heads from which on a GPU is full without splits; not measured


def padded_group(group: int) -> int:
    """Returns the places of a tile for the `group` query heads of one KV head: the next power of 2."""
    return 1 << (group - 1).bit_length()


def num_tiles(num_rows: int, num_segments: int, group: int) -> int:
    """Returns the largest number of tiles for any division of the rows into segments."""
    return num_rows // (TILE // padded_group(group)) + num_segments


def uses_splits(num_programs: int, num_splits: int) -> bool:
    """Returns True if a step has too few programs to fill a GPU, and splits that could fill it.

    `num_programs` is the number of tiles multiplied by that of KV heads.
    """
    return num_splits > 1 and num_programs < _FULL
