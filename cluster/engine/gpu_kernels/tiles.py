"""Division of attention into programs. Imports neither torch nor Triton, because memory is planned without them."""

from __future__ import annotations

TILE = 32  # queries that share a read of keys and values: rows of one segment times query heads of one KV head
SPLIT = 512  # positions of a split; constant, because it determines the order of sums
PARTS = 32  # maximum number of programs that share the splits of a tile
_FULL = 256  # tiles times KV heads that fill a GPU without splits; not measured
_MOST_SPLITS = 2**13  # limit of rows times splits, such as 32 rows over 131,072 positions; 136 MB for 32 heads of 128


def padded_group(group: int) -> int:
    """Returns `group`, the number of query heads of a KV head, rounded up to a power of 2."""
    return 1 << (group - 1).bit_length()


def num_tiles(num_rows: int, num_segments: int, group: int) -> int:
    """Returns the maximum number of tiles over all divisions of the rows into segments."""
    return num_rows // (TILE // padded_group(group)) + num_segments


def uses_splits(num_rows: int, num_kv_heads: int, group: int, num_splits: int) -> bool:
    """Returns True if several programs must share the splits of a tile to fill a GPU.

    Assumes that the rows belong to few segments, because the number of segments is unknown when a step is recorded.
    If each segment has one row, there are more tiles than assumed, but the second kernel costs little.
    """
    num_tiles_at_least = num_rows // (TILE // padded_group(group))
    return num_splits > 1 and num_tiles_at_least * num_kv_heads < _FULL and num_rows * num_splits <= _MOST_SPLITS
