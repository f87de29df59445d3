"""Measures a step's time outside its kernels and the cost of drawing its tokens; printed by `bench.engine`."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from cluster.config.speculation import SpeculationConfig
from cluster.coordination.pool import DraftPool
from cluster.engine import cpu_kernels
from cluster.engine.limits import StepLimits
from cluster.engine.runner import ModelRunner
from cluster.speculation import gumbel_max
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.speculation.sampling import Sampler, SampleRequest, perturbed_logits
from cluster.targets.base import GenerationOutput, GenerationRequest
from cluster.targets.torch import TorchTarget

KERNELS = ((cpu_kernels.kernels, "decode"), (gumbel_max._sampling, "draw"))
SAMPLED_ROWS = (1, 16, 64)
RUNNING = (1, 64)  # sequences that decode together
CONTEXT_LEN = 200
PROMPT_LEN = 16
WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Milliseconds:
    median: float
    quartiles: tuple[float, float]

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Milliseconds:
        low, median, high = statistics.quantiles(seconds, n=4)
        return cls(1e3 * median, (1e3 * low, 1e3 * high))

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.quartiles[0]:.3f}-{self.quartiles[1]:.3f})"


@dataclass(frozen=True, slots=True)
class SamplingTime:
    """Noise and choice of one step's rows, at T = 1."""

    num_rows: int
    reference: Milliseconds  # all of the noise, in NumPy
    sample: Milliseconds  # as a step does it
    greedy: Milliseconds  # likewise, at T = 0


@dataclass(frozen=True, slots=True)
class FrameworkTime:
    """The target's whole loop while sequences decode plainly: schedule, pack, run, sample, commit, publish."""

    num_sequences: int
    step: Milliseconds
    outside_kernels: Milliseconds


@contextmanager
def timed_kernels() -> Iterator[list[float]]:
    """Collects the seconds that calls of the kernels take."""
    seconds: list[float] = []
    originals = [(module, name, getattr(module, name)) for module, name in KERNELS if module is not None]

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


def measure_sampling(logits: torch.Tensor, repeats: int) -> list[SamplingTime]:
    """`logits` [at least the most rows, vocab_size], as a model gives them."""
    sampler = Sampler(logits.device)
    results = []
    for num_rows in SAMPLED_ROWS:
        rows, sampled, greedy = logits[:num_rows], _requests(num_rows, 1.0), _requests(num_rows, 0.0)
        ways = [
            partial(_choose_by_definition, rows, sampled),
            partial(sampler.sample, rows, sampled),
            partial(sampler.sample, rows, greedy),
        ]
        results.append(SamplingTime(num_rows, *_interleaved(ways, repeats)))
    return results


def _requests(num_rows: int, temperature: float) -> list[SampleRequest]:
    params, text = SamplingParams(temperature=temperature), range(CONTEXT_LEN)
    return [SampleRequest(params, NoiseKey(index, 1), text, 1) for index in range(num_rows)]


def _choose_by_definition(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> list[int]:
    choices: list[int] = perturbed_logits(logits, requests).argmax(dim=-1).tolist()
    return choices


def _interleaved(ways: Sequence[Callable[[], object]], repeats: int) -> list[Milliseconds]:
    seconds: list[list[float]] = [[] for _ in ways]
    for _ in range(WARM_UP + repeats):
        for times, way in zip(seconds, ways, strict=True):
            started_at = time.perf_counter()
            way()
            times.append(time.perf_counter() - started_at)
    return [Milliseconds.of(times[WARM_UP:]) for times in seconds]


def measure_framework(runner: ModelRunner, repeats: int) -> list[FrameworkTime]:
    return [_measure_target(runner, num_sequences, repeats) for num_sequences in RUNNING]


def _measure_target(runner: ModelRunner, num_sequences: int, repeats: int) -> FrameworkTime:
    vocab_size = runner.model.config.vocab_size
    max_tokens = WARM_UP + repeats + 1
    # All prompts fit into one step, so that all sequences decode from then on.
    target = TorchTarget(
        "bench",
        runner,
        StepLimits(PROMPT_LEN + max_tokens, num_sequences, num_sequences * PROMPT_LEN),
        DraftPool(""),
        SpeculationConfig(num_speculative_tokens=0),
    )
    steps: list[float] = []
    outside: list[float] = []
    done = threading.Event()
    last = time.perf_counter()
    with timed_kernels() as in_kernels:

        def publish(outputs: Sequence[GenerationOutput]) -> None:
            nonlocal last
            now = time.perf_counter()
            steps.append(now - last)
            outside.append(now - last - sum(in_kernels))
            in_kernels.clear()
            last = now
            if outputs[0].finish_reason is not None:
                done.set()

        for index in range(num_sequences):
            prompt = [(37 * index + 11 * place) % vocab_size for place in range(PROMPT_LEN)]
            key = NoiseKey.derive(index, 0)
            target.submit(GenerationRequest(str(index), prompt, PROMPT_LEN, SamplingParams(), key, max_tokens, True, 0))
        target.start(publish)
        done.wait()
        target.stop()
    assert target.error is None
    return FrameworkTime(num_sequences, *(Milliseconds.of(times[1 + WARM_UP :]) for times in (steps, outside)))


def print_sampling(results: Sequence[SamplingTime]) -> None:
    print("\n| rows drawn | all of the noise, ms | sampling, ms | times faster | greedy, ms |")
    print("| --- | --- | --- | --- | --- |")
    for r in results:
        ratio = r.reference.median / r.sample.median
        print(f"| {r.num_rows} | {r.reference} | {r.sample} | {ratio:.1f} | {r.greedy} |")


def print_framework(results: Sequence[FrameworkTime]) -> None:
    print("\n| sequences decoding in the target's loop | step, ms | of it outside kernels, ms | share |")
    print("| --- | --- | --- | --- |")
    for r in results:
        share = r.outside_kernels.median / r.step.median
        print(f"| {r.num_sequences} | {r.step} | {r.outside_kernels} | {share:.1%} |")
