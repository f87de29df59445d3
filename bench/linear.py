"""All matrix products of a model on this CPU, by kernel: `python -m bench.linear`.

PyTorch's `F.linear`, oneDNN with packed weights, and this project's kernels by every set of instructions that there is
here, the portable one with registers of every width; interleaved; the least of many repeats in milliseconds, as what
disturbs can only add. In brackets: the share of what the machine allows, which is the lower of memory's bandwidth and
0.6 of the rate of a large product in float32, both measured in the same run. The head, which is never quantised, is
left out. `--out` writes them to a file too.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from bench.engine import read_bandwidth
from bench.result import describe_machine, write_result
from cluster.config import Config
from cluster.engine.cpu_kernels import InstructionSet, kernels
from cluster.engine.cpu_linear import KernelLinear
from cluster.engine.linear import Linear, PackedLinear, PlainLinear, _can_pack
from cluster.engine.model_config import ModelConfig
from cluster.engine.quantization import Quantization, quantize
from cluster.model_folder import resolve_model_folder

ROWS = (1, 2, 4, 8, 16, 32, 64)
FORMATS = {"float32": None, "bfloat16": None, "int8": Quantization(8, None), "int4": Quantization(4, 32)}
WARM_UP = 2
SHARE_OF_PRODUCTS = 0.6  # of the rate of a large product, which uses its inputs many times
LANES = (16, 8) if platform.machine() == "x86_64" else (4,)

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
    machine, before, rate, rows = describe_machine(), read_bandwidth(), product_rate(), []
    print(f"{machine['processor']}, {arguments.threads} threads, ms, the least of {arguments.repeats}")
    print(f"reads {before:.1f} GB/s, multiplies {rate:.0f} GFLOP/s in float32")
    for name in arguments.formats.split(","):
        makers = _kernels(name)
        shapes = _shapes(ModelConfig.from_folder(resolve_model_folder(arguments.model)))
        linears = _make(shapes, makers, name)
        num_bytes = sum(linear.num_bytes for linear in next(iter(linears.values())))
        print(f"\n{name}, {num_bytes / 1e6:.0f} MB")
        print("| rows |", *(f"{kernel} |" for kernel in makers))
        print("| --- |", *("--- |" for _ in makers))
        for num_rows in ROWS:
            xs = [torch.randn(num_rows, in_features) for _, in_features in shapes]
            dtype = torch.float32 if name == "float32" else torch.bfloat16
            times = _interleaved(linears, xs, arguments.repeats, dtype)
            flops = 2 * num_rows * sum(out_features * in_features for out_features, in_features in shapes)
            least = 1e-6 * max(num_bytes / before, flops / (SHARE_OF_PRODUCTS * rate))
            rows.append({"format": name, "bytes": num_bytes, "rows": num_rows, "least": least, "milliseconds": times})
            print(f"| {num_rows} |", *(f"{took:.2f} ({least / took:.2f}) |" for took in times.values()), flush=True)
    bandwidth = before, read_bandwidth()
    print(f"\nread bandwidth before and after: {bandwidth[0]:.1f}, {bandwidth[1]:.1f} GB/s")
    if arguments.out is not None:
        document = {"model": arguments.model, "threads": arguments.threads, "machine": machine}
        write_result(arguments.out, document | {"read_bandwidth": bandwidth, "product_rate": rate, "products": rows})


def product_rate() -> float:
    """GFLOP/s of a large product in float32."""
    size, seconds = 1024, []
    a, b = torch.randn(size, size), torch.randn(size, size)
    for _ in range(20):
        started_at = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - started_at)
    return 2e-9 * size**3 / min(seconds)


def _kernels(name: str) -> dict[str, Make]:
    """Returns the kernels by name. PyTorch's have no integers, as they would widen all of them first."""
    found: dict[str, Make] = {}
    if FORMATS[name] is None:
        packs = _can_pack(torch.float32 if name == "float32" else torch.bfloat16)
        of_torch = (PlainLinear, PackedLinear) if packs else (PlainLinear,)
        found = {kernel.__name__: partial(_make_torch, kernel) for kernel in of_torch}
    unreal = (InstructionSet.PORTABLE, InstructionSet.AMX_EMULATED) if name != "float32" else tuple(InstructionSet)
    real = [choice for choice in InstructionSet if choice.is_supported and choice not in unreal]
    found |= {choice.name.lower(): partial(_make_own, choice) for choice in real}
    if kernels is None:
        return found
    widths = [lanes for lanes in LANES if kernels.use_lanes(lanes)]
    kernels.use_lanes(0)
    return found | {f"portable, {lanes} lanes": partial(_make_own, InstructionSet.PORTABLE) for lanes in widths}


def _make_torch(kernel: Callable[[torch.Tensor], Linear], weight: torch.Tensor, _: Quantization | None) -> Linear:
    return kernel(weight)


def _make_own(choice: InstructionSet, weight: torch.Tensor, quantization: Quantization | None) -> Linear:
    return KernelLinear(weight if quantization is None else quantize(weight, quantization), using=choice)


def _make(shapes: Sequence[tuple[int, int]], makers: dict[str, Make], name: str) -> dict[str, list[Linear]]:
    linears: dict[str, list[Linear]] = {kernel: [] for kernel in makers}
    for shape in shapes:
        weight = torch.randn(shape) if name == "float32" else torch.randn(shape).bfloat16()
        for kernel, make in makers.items():
            linears[kernel].append(make(weight, FORMATS[name]))
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
def _interleaved(
    linears: dict[str, list[Linear]], xs: Sequence[torch.Tensor], repeats: int, dtype: torch.dtype
) -> dict[str, float]:
    """Milliseconds. Our own kernels take float32, whatever the weights are; PyTorch's take `dtype`."""
    narrow = [x.to(dtype) for x in xs]
    times: dict[str, list[float]] = {name: [] for name in linears}
    for _ in range(WARM_UP + repeats):
        for name, of_model in linears.items():
            inputs = xs if isinstance(of_model[0], KernelLinear) else narrow
            if kernels is not None:
                kernels.use_lanes(int(name.split()[1]) if name.startswith("portable") else 0)
            started_at = time.perf_counter()
            for linear, x in zip(of_model, inputs, strict=True):
                linear(x)
            times[name].append(time.perf_counter() - started_at)
    return {name: 1e3 * min(seconds[WARM_UP:]) for name, seconds in times.items()}


if __name__ == "__main__":
    main()
