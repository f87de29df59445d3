"""All matrix products of a model on this CPU, by kernel: `python -m bench.linear`.

PyTorch's `F.linear`, oneDNN with packed weights, and this project's kernels by every set of instructions that there is
here, interleaved; the least of many repeats in milliseconds, as what disturbs can only add. The head, which is never
quantised, is left out. `--out` writes them to a file too.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from bench.engine import read_bandwidth
from bench.machine import describe_machine
from cluster.config import Config
from cluster.engine.cpu_kernels import InstructionSet
from cluster.engine.cpu_linear import KernelLinear
from cluster.engine.linear import Linear, PackedLinear, PlainLinear
from cluster.engine.model_config import ModelConfig
from cluster.engine.quantization import Quantization, quantize
from cluster.model_folder import resolve_model_folder

ROWS = (1, 2, 4, 8, 16, 32, 64)
FORMATS = {"bfloat16": None, "int8": Quantization(8, None), "int4": Quantization(4, 32)}
WARM_UP = 2

Make = Callable[[torch.Tensor, Quantization | None], Linear]


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.linear", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=Config().target.model)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    machine, before, rows = describe_machine(), read_bandwidth(), []
    print(f"{machine['processor']}, {arguments.threads} threads, ms, the least of {arguments.repeats}")
    for name in arguments.formats.split(","):
        kernels = _kernels(FORMATS[name])
        shapes = _shapes(ModelConfig.from_folder(resolve_model_folder(arguments.model)))
        linears = _make(shapes, kernels, FORMATS[name])
        num_bytes = sum(linear.num_bytes for linear in next(iter(linears.values())))
        print(f"\n{name}, {num_bytes / 1e6:.0f} MB")
        print("| rows |", *(f"{kernel} |" for kernel in kernels))
        print("| --- |", *("--- |" for _ in kernels))
        for num_rows in ROWS:
            xs = [torch.randn(num_rows, in_features) for _, in_features in shapes]
            times = _interleaved(linears, xs, arguments.repeats)
            rows.append({"format": name, "bytes": num_bytes, "rows": num_rows, "milliseconds": times})
            print(f"| {num_rows} |", *(f"{milliseconds:.2f} |" for milliseconds in times.values()), flush=True)
    bandwidth = before, read_bandwidth()
    print(f"\nread bandwidth before and after: {bandwidth[0]:.1f}, {bandwidth[1]:.1f} GB/s")
    if arguments.out is not None:
        document = {"model": arguments.model, "threads": arguments.threads, "machine": machine}
        arguments.out.write_text(
            json.dumps(document | {"read_bandwidth": bandwidth, "products": rows}, indent=2) + "\n"
        )


def _kernels(quantization: Quantization | None) -> dict[str, Make]:
    """Returns the kernels by name. PyTorch's only have bfloat16 weights, as they would widen all integers first."""
    kernels: dict[str, Make] = {}
    if quantization is None:
        kernels = {kernel.__name__: partial(_make_torch, kernel) for kernel in (PlainLinear, PackedLinear)}
    real = [choice for choice in InstructionSet if choice.is_supported and choice is not InstructionSet.AMX_EMULATED]
    return kernels | {choice.name.lower(): partial(_make_own, choice) for choice in real}


def _make_torch(kernel: Callable[[torch.Tensor], Linear], weight: torch.Tensor, _: Quantization | None) -> Linear:
    return kernel(weight)


def _make_own(choice: InstructionSet, weight: torch.Tensor, quantization: Quantization | None) -> Linear:
    return KernelLinear(weight if quantization is None else quantize(weight, quantization), using=choice)


def _make(
    shapes: Sequence[tuple[int, int]], kernels: dict[str, Make], quantization: Quantization | None
) -> dict[str, list[Linear]]:
    linears: dict[str, list[Linear]] = {name: [] for name in kernels}
    for shape in shapes:
        weight = torch.randn(shape).bfloat16()
        for name, make in kernels.items():
            linears[name].append(make(weight, quantization))
    return linears


def _shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """Outputs and inputs, layer by layer."""
    layer = [
        (config.q_size + 2 * config.kv_size, config.hidden_size),
        (config.hidden_size, config.q_size),
        (2 * config.intermediate_size, config.hidden_size),
        (config.hidden_size, config.intermediate_size),
    ]
    return layer * config.num_layers


@torch.inference_mode()
def _interleaved(linears: dict[str, list[Linear]], xs: Sequence[torch.Tensor], repeats: int) -> dict[str, float]:
    """Milliseconds. Our own kernels take float32, whatever the weights are."""
    narrow = [x.bfloat16() for x in xs]
    times: dict[str, list[float]] = {name: [] for name in linears}
    for _ in range(WARM_UP + repeats):
        for name, of_model in linears.items():
            inputs = xs if isinstance(of_model[0], KernelLinear) else narrow
            started_at = time.perf_counter()
            for linear, x in zip(of_model, inputs, strict=True):
                linear(x)
            times[name].append(time.perf_counter() - started_at)
    return {name: 1e3 * min(seconds[WARM_UP:]) for name, seconds in times.items()}


if __name__ == "__main__":
    main()
