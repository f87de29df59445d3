"""Finds the fastest tiles of the fixed-order product on this GPU: `python -m bench.gpu_tune --out tiles.json`.

Set `target.product_tiles` or `draft.product_tiles` to the file. Tiles change no bit of a result. For few, some and many
rows, every candidate is timed with the projections of `--model`, or of an 8B shape, in bfloat16. A candidate that needs
more registers or shared memory than the GPU has is left out.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch

from bench.gpu import LLAMA_8B, config_of
from bench.gpu_kernels import microseconds, operands
from bench.result import write_result
from cluster.engine.gpu_kernels.product_tiles import TILES, Tile, num_parts, uses_programs_of_parts
from cluster.engine.model_config import ModelConfig
from cluster.model_folder import resolve_model_folder

HEIGHTS = ((1, 8, 16), (32, 64), (512, 2048))  # rows that each tile is timed with, by its place in the table
CANDIDATES = (
    tuple(Tile(16, *rest) for rest in itertools.product((32, 64, 128), (2, 4, 8), (3, 4, 6, 8))),
    tuple(Tile(*sizes) for sizes in itertools.product((32, 64), (64, 128), (4, 8), (3, 4, 5))),
    tuple(Tile(*sizes) for sizes in itertools.product((64, 128), (64, 128, 256), (4, 8), (2, 3, 4))),
)
_WEIGHT_BYTES = 2**28  # several weights are multiplied in turn, so that the cache holds none of them
_VALUE_BYTES = 2

Timer = Callable[[Tile, int], float]
"Returns the microseconds of all projections with a tile, for a number of rows. Raises RuntimeError if it cannot run."


def fastest(candidates: Iterable[Tile], heights: Sequence[int], time: Timer, before: Tile) -> tuple[Tile, float]:
    """Returns the candidate with the least time, and its time over that of `before`.

    Times of different heights count as ratios to those of `before`.
    """
    base = [time(before, height) for height in heights]
    best, least = before, 1.0
    for tile in candidates:
        try:
            ratio = sum(time(tile, height) / own for height, own in zip(heights, base, strict=True)) / len(heights)
        except Exception as error:  # Triton has no common class for kernels that a GPU cannot run
            print(f"{tile}: {type(error).__name__}", file=sys.stderr)
            continue
        if ratio < least:
            best, least = tile, ratio
    return best, least


def timer(device: torch.device, config: ModelConfig) -> Timer:
    """Returns a timer of the projections of a layer of `config`."""
    from cluster.engine.gpu_kernels.product import product_by_tiles  # needs Triton

    hidden = config.hidden_size
    shapes = (
        (config.q_size + 2 * config.kv_size, hidden),
        (hidden, config.q_size),
        (2 * config.intermediate_size, hidden),
        (hidden, config.intermediate_size),
    )
    most = max(itertools.chain(*HEIGHTS))
    made = [
        operands(device, most, *shape, 1 + _WEIGHT_BYTES // (_VALUE_BYTES * shape[0] * shape[1])) for shape in shapes
    ]

    def time(tile: Tile, height: int) -> float:
        total = 0.0
        for x, weights in made:
            num_outputs, num_inputs = weights.shape[1:]
            parts = num_parts(num_outputs, num_inputs)
            is_split = uses_programs_of_parts(tile, height, num_outputs, parts)
            total += microseconds(
                [partial(product_by_tiles, x[:height], weight, None, tile, is_split=is_split) for weight in weights], 3
            )
        return total

    return time


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.gpu_tune", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="folder or bundled model whose projections are timed; default: an 8B shape")
    parser.add_argument("--out", type=Path, required=True, help="file for `product_tiles`")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("PyTorch finds no GPU: nothing is timed", file=sys.stderr)
        return 1
    model = arguments.model
    config = config_of(LLAMA_8B) if model is None else ModelConfig.from_folder(resolve_model_folder(model))
    time = timer(torch.device("cuda"), config)
    found = []
    for before, candidates, heights in zip(TILES[_VALUE_BYTES], CANDIDATES, HEIGHTS, strict=True):
        tile, ratio = fastest(candidates, heights, time, before)
        print(f"{heights} rows: {tile}, {ratio:.2f} of the time of {before}", flush=True)
        found.append([tile.num_rows, tile.num_columns, tile.num_warps, tile.num_stages])
    document = {"gpu": torch.cuda.get_device_name(), "tiles": found}
    write_result(arguments.out, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
