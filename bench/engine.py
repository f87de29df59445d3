"""A verify step of the engine, whole, against the speed at which memory can be read: `python -m bench.engine`.

A step is packing, the forward pass and sampling at T = 1. Its bandwidth counts the weights once; a context of 200
tokens is attended to by every row. A tree of 16 nodes is compared with a chain of as many, which should take as long;
then follow sampling and the target's loop, apart. What is compared is interleaved; figures are medians with their
quartiles. `--instruction-sets amx,avx512_bf16,portable` compares what the CPU kernels can be made of.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench.machine import describe_machine
from bench.step_parts import (
    SAMPLED_ROWS,
    Milliseconds,
    measure_framework,
    measure_sampling,
    print_framework,
    print_sampling,
    timed_kernels,
)
from cluster.config import Config
from cluster.config.workers import QuantizationName
from cluster.engine.batch import Segment
from cluster.engine.cpu_kernels import VARIABLE, instruction_set
from cluster.engine.cpu_model import CpuModel
from cluster.engine.runner import ModelRunner
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.speculation.sampling import Sampler, SampleRequest

CONTEXT_LEN = 200
SHAPES = ((1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (1, 64), (8, 1), (64, 1))  # sequences, tokens of each
TREE = [-1, *((node - 1) // 2 for node in range(1, 16))]  # parents: every node has two children, down to depth 3
WARM_UP = 3


@dataclass(frozen=True, slots=True)
class TreeTime:
    """A verify step of one sequence, as a tree and as a chain of as many tokens."""

    weights: str
    instructions: str | None
    num_nodes: int
    chain: Milliseconds
    tree: Milliseconds
    tree_over_chain: float


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

    def verify_tree(self) -> None:
        """As `step(1, 16)`, with the tokens in a tree."""
        text, start = self._texts[0], CONTEXT_LEN - len(TREE)
        segment = Segment(text[start:], start, self._tables[0], len(TREE), TREE)
        logits = self.runner.run([segment])
        lengths = [start + len(path) for path in segment.paths()]
        params, key = SamplingParams(temperature=1.0), NoiseKey(0, 1)
        self._sampler.sample(logits, [SampleRequest(params, key, range(length), start) for length in lengths])

    def logits(self, num_rows: int) -> torch.Tensor:
        return self.runner.run([Segment(self._texts[0][-num_rows:], CONTEXT_LEN - num_rows, self._tables[0], num_rows)])


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


def measure_tree(engine: Engine, repeats: int) -> TreeTime:
    chains, trees = [], []
    for _ in range(WARM_UP + repeats):
        started_at = time.perf_counter()
        engine.step(1, len(TREE))
        chain_at = time.perf_counter()
        engine.verify_tree()
        chains.append(chain_at - started_at)
        trees.append(time.perf_counter() - chain_at)
    chain, tree = Milliseconds.of(chains[WARM_UP:]), Milliseconds.of(trees[WARM_UP:])
    return TreeTime(engine.weights, engine.instructions, len(TREE), chain, tree, tree.median / chain.median)


def print_trees(results: Sequence[TreeTime]) -> None:
    print("\n| weights | instructions | nodes | chain, ms | tree, ms | tree / chain |")
    print("| --- | --- | --- | --- | --- | --- |")
    for r in results:
        print(
            f"| {r.weights} | {r.instructions or '-'} | {r.num_nodes} | {r.chain} | {r.tree} "
            f"| {r.tree_over_chain:.2f} |"
        )


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
    trees = [measure_tree(engine, arguments.repeats) for engine in engines]
    print_trees(trees)
    sampling = measure_sampling(engines[0].logits(max(SAMPLED_ROWS)), arguments.repeats)
    print_sampling(sampling)
    framework = measure_framework(engines[0].runner, arguments.repeats)
    print_framework(framework)
    bandwidth = (before, read_bandwidth())
    print(f"\nread bandwidth before and after: {bandwidth[0]:.1f}, {bandwidth[1]:.1f} GB/s")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "model": arguments.model,
        "threads": arguments.threads,
        "machine": machine,
        "read_bandwidth": bandwidth,
        "steps": [asdict(result) for result in results],
        "trees": [asdict(result) for result in trees],
        "sampling": [asdict(result) for result in sampling],
        "framework": [asdict(result) for result in framework],
    }
    arguments.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
