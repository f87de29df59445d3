"""Products in a fixed order and invariant numerics on a GPU: part of `bench.gpu_check`.

Rows must have the same bits at every height, in every tile, and with or without programs of parts. Times are compared
with cuBLAS's. Each is taken from a CUDA graph that reads more weights than the L2 cache holds. Every result is logged
as soon as it is known, and a shape that fails does not stop the others.
"""

from __future__ import annotations

import statistics
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from bench.gpu_rows import Row, milliseconds
from cluster.config import Config
from cluster.config.workers import Numerics
from cluster.engine.batch import Segment
from cluster.engine.gpu_kernels.product import product, product_by_tiles
from cluster.engine.gpu_kernels.product_tiles import TILES
from cluster.engine.invariance import check_invariance
from cluster.engine.loader import load_model
from cluster.engine.runner import ModelRunner
from cluster.model_folder import resolve_model_folder

Shape = tuple[int, int]
"""Outputs and inputs of a product."""

SHAPES: dict[str, Shape] = {
    "qkv": (6144, 4096),
    "output": (4096, 4096),
    "gate and up": (28_672, 4096),
    "down": (4096, 14_336),
    "head": (128_256, 4096),
}
"""Products of Llama 3.1 8B."""
HEIGHTS = (*range(1, 65), 65, 128, 200, 512, 2048)
TIMED_HEIGHTS = (1, 16, 64, 256, 2048)
_LEAST_BYTES = 300e6  # of weights between two readings of one, several times the L2 cache
_COMPARED_OUTPUTS = 2048  # whose errors are computed
BLOCK_SIZE, NUM_BLOCKS, MAX_ROWS, MAX_CONTEXT = 16, 256, 128, 1024


def check_products(device: torch.device) -> list[Row]:
    return [_bits(device, SHAPES, HEIGHTS), _times(device, SHAPES, TIMED_HEIGHTS), _model(device)]


def _bits(device: torch.device, shapes: dict[str, Shape], heights: Sequence[int]) -> Row:
    """Compares the bits of rows at every height with those among the most rows."""
    found = {
        name: _attempt(f"bits, {name}", partial(_bits_of, device, *shape, heights)) for name, shape in shapes.items()
    }
    differing = sum(one["rows with other bits"] for one in found.values() if one is not None)
    held = None not in found.values() and not differing
    seen = f"{differing} rows had other bits at one of {len(heights)} heights or in another tile"
    return Row("products in a fixed order, bits in bfloat16", held, seen, found)


def _bits_of(device: torch.device, num_outputs: int, num_inputs: int, heights: Sequence[int]) -> dict[str, Any]:
    x, weights = operands(device, max(heights), num_outputs, num_inputs, 1)
    weight = weights[0]
    whole, whole_by_cublas = product(x, weight), F.linear(x, weight)
    other, other_by_cublas = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
    for height in heights:
        other += _num_other_rows(product(x[:height], weight), whole[:height])
        other += _num_other_rows(product(x[-height:], weight), whole[-height:])
        other_by_cublas += _num_other_rows(F.linear(x[:height], weight), whole_by_cublas[:height])
    for height in (1, 64, 200):
        for tile in TILES[x.itemsize]:
            for is_split in (False, True):
                cut = product_by_tiles(x[:height], weight, None, tile, is_split=is_split)
                other += _num_other_rows(cut, whole[:height])
    exact = x[:64].double() @ weight[:_COMPARED_OUTPUTS].double().T
    errors = [float((found[:64, :_COMPARED_OUTPUTS] - exact).abs().max()) for found in (whole, whole_by_cublas)]
    return {
        "rows with other bits": int(other),
        "cuBLAS's rows with other bits": int(other_by_cublas),
        "largest error": errors[0],
        "cuBLAS's largest error": errors[1],
    }


def _num_other_rows(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return (found != expected).any(1).sum()


def _times(device: torch.device, shapes: dict[str, Shape], heights: Sequence[int]) -> Row:
    """Times a product and cuBLAS's."""
    found: dict[str, Any] = {}
    for name, shape in shapes.items():
        of_shape = _attempt(f"times, {name}", partial(_times_of, device, *shape, heights))
        found |= {f"{name}, {key}": value for key, value in (of_shape or {"failed": True}).items()}
    return Row("products in a fixed order, times in bfloat16", None, "compared with cuBLAS's", found)


def _times_of(device: torch.device, num_outputs: int, num_inputs: int, heights: Sequence[int]) -> dict[str, Any]:
    weight_bytes = 2 * num_outputs * num_inputs
    x, weights = operands(device, max(heights), num_outputs, num_inputs, 1 + int(_LEAST_BYTES / weight_bytes))
    figures = {}
    for height in heights:
        calls: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"fixed": product, "cuBLAS": F.linear}
        for name, call in calls.items():
            taken = microseconds([partial(call, x[:height], weight) for weight in weights])
            figures[f"{name}, {height} rows"] = {
                "us": round(taken, 1),
                "TB/s": round(weight_bytes / taken / 1e6, 2),
                "TFLOP/s": round(height * weight_bytes / taken / 1e6, 1),
            }
    return figures


def microseconds(calls: Sequence[Callable[[], torch.Tensor]], repeats: int = 7) -> float:
    """Returns the median time of one of `calls`, which are replayed one after the other."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):  # kernels are compiled and libraries set themselves up, which cannot be recorded
        calls[0]()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(2 + repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()  # type: ignore[no-untyped-call]
        graph.replay()
        end.record()  # type: ignore[no-untyped-call]
        end.synchronize()  # type: ignore[no-untyped-call]
        times.append(1e3 * start.elapsed_time(end) / len(calls))  # type: ignore[no-untyped-call]
    return statistics.median(times[2:])


def _model(device: torch.device) -> Row:
    """The check at start, on the bundled target, before its steps are recorded and after."""
    figures: dict[str, Any] = {}
    held = True
    for name, prepares in (("steps not recorded", False), ("recorded steps", True)):
        passed = _attempt(f"check at start, {name}", partial(_checked, device, prepares=prepares))
        figures |= passed or {name: "failed"}
        held = held and passed is not None
    figures |= _attempt("steps, fast", partial(_step_times, device, "fast")) or {}
    figures |= _attempt("steps, invariant", partial(_step_times, device, "invariant")) or {}
    return Row("check of invariant numerics at start", held, "passed" if held else "not passed", figures)


def _checked(device: torch.device, *, prepares: bool) -> dict[str, Any]:
    runner = _runner(device, "invariant", prepares=prepares)
    check_invariance(runner)
    return {f"check of {type(runner.model).__name__}, {'recorded' if prepares else 'not recorded'}": "passed"}


def _step_times(device: torch.device, numerics: Numerics) -> dict[str, Any]:
    """Times recorded steps of decodes."""
    runner, figures = _runner(device, numerics, prepares=True), {}
    for num_rows in (1, 16, 64):
        segments = [Segment([1], 40, list(range(3 * i, 3 * i + 3)), 1) for i in range(num_rows)]

        def step(segments: Sequence[Segment] = segments) -> None:
            runner.run(segments)
            runner.wait()

        figures[f"ms, {numerics}, {num_rows} decodes"] = milliseconds(step)
    return figures


def _runner(device: torch.device, numerics: Numerics, *, prepares: bool) -> ModelRunner:
    folder = resolve_model_folder(Config().target.model)
    runner = ModelRunner(load_model(folder, torch.bfloat16, device, numerics=numerics), BLOCK_SIZE, NUM_BLOCKS)
    if prepares:
        runner.model.prepare(MAX_ROWS, MAX_CONTEXT)
    return runner


def operands(
    device: torch.device, num_rows: int, num_outputs: int, num_inputs: int, num_weights: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns x and several weights in bfloat16. Outputs are about 1."""
    generator = torch.Generator(device).manual_seed(num_outputs + num_inputs)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    return normal(num_rows, num_inputs), normal(num_weights, num_outputs, num_inputs).mul_(num_inputs**-0.5)


def _attempt(name: str, call: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the figures that `call` finds, or None if it fails, and logs either."""
    try:
        found = call()
    except Exception as error:
        traceback.print_exc()
        print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return None
    for key, value in found.items():
        print(f"{name}: {key}: {value}", file=sys.stderr, flush=True)
    return found


CHECKS: dict[str, Callable[[torch.device], list[Row]]] = {"product-invariant": check_products}
