"""What packing a weight once is worth on this CPU: `python -m bench.linear`.

Times one layer's products of the bundled target, plain `F.linear` beside the engine's `Linear`, interleaved; prints
medians in microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from cluster.config import Config
from cluster.engine.linear import Linear
from cluster.engine.model_config import ModelConfig
from cluster.model_folder import resolve_model_folder

ROWS = (1, 2, 5, 9, 16, 64)
NUM_LAYERS = 12  # products of several layers, so that weights come from memory or L3 as in a real step


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.linear", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    config = ModelConfig.from_folder(resolve_model_folder(Config().target.model))
    shapes = (
        (config.q_size + 2 * config.kv_size, config.hidden_size),
        (config.hidden_size, config.q_size),
        (2 * config.intermediate_size, config.hidden_size),
        (config.hidden_size, config.intermediate_size),
    )
    print(f"{arguments.threads} threads, medians of {arguments.repeats}, µs a layer\n")
    print("| dtype | rows | F.linear | packed |\n| --- | --- | --- | --- |")
    for dtype in (torch.float32, torch.bfloat16):
        weights = [torch.randn(shape).to(dtype) for _ in range(NUM_LAYERS) for shape in shapes]
        packed = [Linear(weight) for weight in weights]
        for rows in ROWS:
            inputs = [torch.randn(rows, weight.shape[1]).to(dtype) for weight in weights]

            def plain(inputs: list[torch.Tensor] = inputs, weights: list[torch.Tensor] = weights) -> None:
                for x, weight in zip(inputs, weights, strict=True):
                    F.linear(x, weight)

            def ours(inputs: list[torch.Tensor] = inputs, packed: list[Linear] = packed) -> None:
                for x, linear in zip(inputs, packed, strict=True):
                    linear(x)

            times = _interleaved(arguments.repeats, plain, ours)
            print(f"| {str(dtype)[6:]} | {rows} | {times[0]:.0f} | {times[1]:.0f} |", flush=True)


@torch.inference_mode()
def _interleaved(repeats: int, *functions: Callable[[], None]) -> list[float]:
    """Median microseconds a layer of each function."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats + 3):
        for function, own in zip(functions, times, strict=True):
            started_at = time.perf_counter()
            function()
            own.append((time.perf_counter() - started_at) / NUM_LAYERS * 1e6)
    return [statistics.median(own[3:]) for own in times]


if __name__ == "__main__":
    main()
