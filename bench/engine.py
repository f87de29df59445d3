"""A verify step of the engine, whole, against the speed at which memory can be read: `python -m bench.engine`.

A step is packing, the forward pass and sampling at T = 1. Its bandwidth counts the weights once; a context of 200
tokens is attended to by every row. Models and instruction sets are measured in turn; figures are medians with their
quartiles. `--instruction-sets amx,avx512_bf16,portable` compares what the CPU kernels can be made of.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench.result import describe_machine, write_result
from cluster.config import Config
from cluster.config.workers import QuantizationName
from cluster.engine import cpu_kernels
from cluster.engine.batch import Segment
from cluster.engine.cpu_kernels import VARIABLE, instruction_set
from cluster.engine.cpu_model import CpuModel
from cluster.engine.runner import ModelRunner
from cluster.speculation import gumbel_max
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.speculation.sampling import Sampler, SampleRequest

CONTEXT_LEN = 200
SHAPES = ((1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (1, 64), (8, 1), (64, 1))  # sequences, tokens of each
_KERNELS = ((cpu_kernels.kernels, "decode"), (gumbel_max._sampling, "draw"))
WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Measured:
    weights: str  # bfloat16, int8, ...
    instructions: str | None  # that the CPU kernels' products are made of
    num_sequences: int
    num_tokens: int  # of each
    milliseconds: float
    quartiles: tuple[float, float]
    outside_kernels_ms: float  # Python and PyTorch
    gigabytes_per_second: float


class Engine:
    """One model with sequences in its cache; `instructions` as in `OUTRIDER_CPU_ISA`, which decides without it."""

    def __init__(
        self, model: str, dtype: str, quantization: QuantizationName | None, instructions: str | None = None
    ) -> None:
        if instructions is not None:
            os.environ[VARIABLE] = instructions
        settings = {"model": model, "dtype": dtype, "quantization": quantization, "kv_cache_bytes": 2**30}
        config = Config().target.model_copy(update=settings)
        self.weights = quantization or dtype
        self.runner = ModelRunner.from_config(config)
        loaded = self.runner.model
        self.instructions = instruction_set(loaded.dtype).name.lower() if isinstance(loaded, CpuModel) else None
        self._sampler = Sampler(loaded.device)
        num_blocks = self.runner.blocks.num_blocks_for(CONTEXT_LEN)
        tables = [self.runner.blocks.allocate(num_blocks) for _ in range(max(n for n, _ in SHAPES))]
        self._tables = [table for table in tables if table is not None]
        assert len(self._tables) == len(tables)
        rng, vocab_size = random.Random(0), self.runner.model.config.vocab_size
        self._texts = [[rng.randrange(vocab_size) for _ in range(CONTEXT_LEN)] for _ in tables]

    def step(self, num_sequences: int, num_tokens: int) -> None:
        texts, start = self._texts[:num_sequences], CONTEXT_LEN - num_tokens
        logits = self.runner.run(
            [Segment(t[start:], start, b, num_tokens) for t, b in zip(texts, self._tables, strict=False)]
        )
        params = SamplingParams(temperature=1.0)
        self._sampler.sample(
            logits, [SampleRequest(params, NoiseKey(i, 1), t, start, num_tokens) for i, t in enumerate(texts)]
        )


@contextmanager
def timed_kernels() -> Iterator[list[float]]:
    """Collects the seconds that calls of the kernels take."""
    seconds: list[float] = []
    originals = [(module, name, getattr(module, name)) for module, name in _KERNELS if module is not None]

    def timed(kernel: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: object) -> None:
            started_at = time.perf_counter()
            kernel(*arguments)
            seconds.append(time.perf_counter() - started_at)

        return call

    for module, name, kernel in originals:
        setattr(module, name, timed(kernel))
    try:
        yield seconds
    finally:
        for module, name, kernel in originals:
            setattr(module, name, kernel)


def measure(engines: Sequence[Engine], shape: tuple[int, int], repeats: int) -> list[Measured]:
    totals: list[list[float]] = [[] for _ in engines]
    outside: list[list[float]] = [[] for _ in engines]
    with timed_kernels() as in_kernels:
        for _ in range(WARM_UP + repeats):
            for index, engine in enumerate(engines):
                in_kernels.clear()
                started_at = time.perf_counter()
                engine.step(*shape)
                totals[index].append(time.perf_counter() - started_at)
                outside[index].append(totals[index][-1] - sum(in_kernels))
    results = []
    for engine, total, rest in zip(engines, totals, outside, strict=True):
        low, median, high = statistics.quantiles(total[WARM_UP:], n=4)
        results.append(
            Measured(
                weights=engine.weights,
                instructions=engine.instructions,
                num_sequences=shape[0],
                num_tokens=shape[1],
                milliseconds=1e3 * median,
                quartiles=(1e3 * low, 1e3 * high),
                outside_kernels_ms=1e3 * statistics.median(rest[WARM_UP:]),
                gigabytes_per_second=engine.runner.model.num_bytes_read / median / 1e9,
            )
        )
    return results


def read_bandwidth(repeats: int = 9) -> float:
    """GB/s at which this process sums half a gigabyte."""
    numbers = torch.ones(2**27)
    seconds = []
    for _ in range(repeats):
        started_at = time.perf_counter()
        numbers.sum()
        seconds.append(time.perf_counter() - started_at)
    return numbers.nbytes / statistics.median(seconds) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.engine", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=Config().target.model)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantizations", default="int8,int4", help="measured beside the dtype; empty for none")
    parser.add_argument("--instruction-sets", default="", help=f"of the CPU kernels, as in {VARIABLE}; empty: the best")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path("bench/results/engine.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    names = [None, *(name for name in arguments.quantizations.split(",") if name)]
    sets = arguments.instruction_sets.split(",") if arguments.instruction_sets else [None]
    engines = [Engine(arguments.model, arguments.dtype, name, instructions) for name in names for instructions in sets]
    before, machine = read_bandwidth(), describe_machine()
    print(f"{arguments.model}, {arguments.threads} threads, medians of {arguments.repeats} (quartiles)")
    print(f"{machine['processor']}\n")
    print("| weights | instructions | sequences x tokens | ms | GB/s | against 1 x 1 | ms outside kernels |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    results: list[Measured] = []
    first: dict[tuple[str, str | None], float] = {}
    for shape in SHAPES:
        for result in measure(engines, shape, arguments.repeats):
            results.append(result)
            kind = result.weights, result.instructions
            ratio = result.milliseconds / first.setdefault(kind, result.milliseconds)
            low, high = result.quartiles
            print(
                f"| {result.weights} | {result.instructions or '-'} | {result.num_sequences} x {result.num_tokens} "
                f"| {result.milliseconds:.2f} ({low:.2f}-{high:.2f}) | {result.gigabytes_per_second:.1f} "
                f"| {ratio:.2f} | {result.outside_kernels_ms:.2f} |",
                flush=True,
            )
    bandwidth = (before, read_bandwidth())
    print(f"\nread bandwidth before and after: {bandwidth[0]:.1f}, {bandwidth[1]:.1f} GB/s")
    document = {
        "model": arguments.model,
        "threads": arguments.threads,
        "machine": machine,
        "read_bandwidth": bandwidth,
        "steps": [asdict(result) for result in results],
    }
    write_result(arguments.out, document)


if __name__ == "__main__":
    main()
