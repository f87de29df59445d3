"""A layer's matrix products on this CPU, by kernel: `python -m bench.linear`.

PyTorch's `F.linear`, oneDNN with packed weights, and this project's kernel, interleaved; medians in microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from cluster.config import Config
from cluster.engine.cpu_kernels import has_kernels
from cluster.engine.cpu_linear import KernelLinear
from cluster.engine.linear import Linear, PackedLinear, PlainLinear
from cluster.engine.model_config import ModelConfig
from cluster.model_folder import resolve_model_folder

ROWS = (1, 2, 5, 8, 16, 64)
NUM_LAYERS = 6  # products of several layers, so that weights come from memory or L3 as in a real step


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.linear", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=Config().target.model)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    config = ModelConfig.from_folder(resolve_model_folder(arguments.model))
    shapes = (
        (config.q_size + 2 * config.kv_size, config.hidden_size),
        (config.hidden_size, config.q_size),
        (2 * config.intermediate_size, config.hidden_size),
        (config.hidden_size, config.intermediate_size),
    )
    kernels = (PlainLinear, PackedLinear, *([KernelLinear] if has_kernels() else []))
    print(f"{arguments.threads} threads, medians of {arguments.repeats}, µs a layer\n")
    print("| dtype | rows |", *(f"{kernel.__name__} |" for kernel in kernels))
    print("| --- | --- |", *("--- |" for _ in kernels))
    for dtype in (torch.float32, torch.bfloat16):
        weights = [torch.randn(shape).to(dtype) for _ in range(NUM_LAYERS) for shape in shapes]
        linears: list[list[Linear]] = [[kernel(weight) for weight in weights] for kernel in kernels]
        for rows in ROWS:
            wide = [torch.randn(rows, weight.shape[1]) for weight in weights]
            narrow = [x.to(dtype) for x in wide]
            runs = [
                partial(_multiply, layers, wide if kernel is KernelLinear else narrow)
                for kernel, layers in zip(kernels, linears, strict=True)
            ]
            times = _interleaved(arguments.repeats, *runs)
            print(f"| {str(dtype)[6:]} | {rows} |", *(f"{time:.0f} |" for time in times), flush=True)


def _multiply(linears: Sequence[Linear], inputs: Sequence[torch.Tensor]) -> None:
    for linear, x in zip(linears, inputs, strict=True):
        linear(x)


@torch.inference_mode()
def _interleaved(repeats: int, *functions: Callable[[], None]) -> list[float]:
    """Median microseconds a layer of each function."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats + 3):
        for function, microseconds in zip(functions, times, strict=True):
            started_at = time.perf_counter()
            function()
            microseconds.append((time.perf_counter() - started_at) / NUM_LAYERS * 1e6)
    return [statistics.median(microseconds[3:]) for microseconds in times]


if __name__ == "__main__":
    main()
