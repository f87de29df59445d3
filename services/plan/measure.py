"""Step times of the installed engines, for plans of this machine.

Target and draft are timed one after the other, in separate processes with the cores that `outrider serve` would give
them. They also run in turn on a small host: they share cores, and while the draft drafts the target waits.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from cluster.config import Config
from cluster.config.workers import WorkerConfig
from cluster.drafters.base import Drafter, DraftSequence
from cluster.engine.batch import Segment
from cluster.engine.runner import ModelRunner
from cluster.errors import ConfigurationError
from cluster.factories.drafters import make_drafter
from cluster.planning.options import LOCAL_ROUND_TRIP_SECONDS
from cluster.planning.prediction import ExpectedLoad, Option
from cluster.planning.round_costs import Drafting
from cluster.planning.steps import MeasuredSteps
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.speculation.sampling import Sampler, SampleRequest
from services.launch.cores import divide_cores
from services.worker import prepare_process

_DEPTHS = (0, 1, 2, 4, 8, 16)
_WARM_UP, _REPEATS = 2, 9
_MAX_SECONDS = 4.0  # time for one point

Points = tuple[tuple[int, float], ...]
ConfigT = TypeVar("ConfigT", bound=WorkerConfig)


@dataclass(frozen=True, slots=True)
class MeasuredStepTimes:
    """Rows and seconds of the target's steps and of the draft's."""

    target: MeasuredSteps
    draft: MeasuredSteps


def measured_options(
    config: Config,
    load: ExpectedLoad,
    acceptance_rate: float,
    temperature: float,
    num_speculative_tokens: int | None,
    round_trip_seconds: float = LOCAL_ROUND_TRIP_SECONDS,
) -> list[Option]:
    """Measures steps. Returns two options: without speculation, and with the draft on the target's cores.

    Raises ConfigurationError if a model cannot be loaded.
    """
    times = measure_steps(config, load, temperature)
    alone = Option("no speculation", times.target)
    drafting = Drafting(times.draft, acceptance_rate, round_trip_seconds)
    return [
        alone,
        Option("draft on shared cores", times.target, drafting, num_speculative_tokens=num_speculative_tokens),
    ]


def measure_steps(config: Config, load: ExpectedLoad, temperature: float) -> MeasuredStepTimes:
    """Measures steps of `load.num_seqs` sequences in the middle of their answers. Raises ConfigurationError."""
    if config.target.engine != "torch":
        raise ConfigurationError(f"--measure times target.engine torch, not {config.target.engine}")
    shares = divide_cores(sorted(os.sched_getaffinity(0)), 1, 1)
    pinned = config.model_copy(
        update={
            "target": _on(config.target, shares.targets[0]),
            "draft": _on(config.draft, shares.drafts[0]),
        }
    )
    (target,), (draft,) = (measure(pinned, [load], temperature) for measure in (measure_target, measure_draft))
    return MeasuredStepTimes(target, draft)


def measure_target(config: Config, loads: Sequence[ExpectedLoad], temperature: float) -> list[MeasuredSteps]:
    """Times steps of the PyTorch engine for each load, on `target.cpus`. Raises ConfigurationError."""
    for load in loads:
        _check_room(config.target, load)
    return _apart(_time_target, config, loads, temperature)


def measure_draft(config: Config, loads: Sequence[ExpectedLoad], temperature: float) -> list[MeasuredSteps]:
    """Times steps of the drafter for each load, on `draft.cpus`. Raises ConfigurationError."""
    return _apart(_time_draft, config, loads, temperature)


def _check_room(target: WorkerConfig, load: ExpectedLoad) -> None:
    most = min(target.max_num_seqs, target.max_num_batched_tokens)
    if load.num_seqs > most:
        raise ConfigurationError(f"{load.num_seqs} sequences are more than the target's {most}: raise its limits")


def _on(config: ConfigT, cpus: tuple[int, ...] | None) -> ConfigT:
    return config if config.cpus is not None else config.model_copy(update={"cpus": cpus})


def _apart(
    measure: Callable[[Config, Sequence[ExpectedLoad], float], list[Points]],
    config: Config,
    loads: Sequence[ExpectedLoad],
    temperature: float,
) -> list[MeasuredSteps]:
    """Runs `measure` in a separate process, whose end frees its cores, threads and memory."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return [MeasuredSteps(points) for points in pool.submit(measure, config, loads, temperature).result()]
        except KeyboardInterrupt:  # leaving the block waits for running work
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _time_target(config: Config, loads: Sequence[ExpectedLoad], temperature: float) -> list[Points]:
    prepare_process(config.target)
    runner = ModelRunner.from_config(config.target, numerics=config.target.numerics)
    sampler = Sampler(runner.model.device)
    most_rows = config.target.max_num_batched_tokens
    return [_target_points(runner, sampler, load, most_rows, temperature) for load in loads]


def _target_points(
    runner: ModelRunner, sampler: Sampler, load: ExpectedLoad, most_rows: int, temperature: float
) -> Points:
    context = int(load.mean_context)
    shapes = [_Shape(count, 0) for count in sorted({1, max(1, load.num_seqs // 2), load.num_seqs})]
    shapes += [_Shape(load.num_seqs, depth) for depth in _DEPTHS[1:]]
    points = {}
    for shape in [*shapes, _Shape(load.num_seqs, 0, load.prompt_tokens)]:
        if shape.num_rows <= most_rows:
            segments, requests = shape.segments(runner, context, SamplingParams(temperature=temperature))

            def step(segments: Sequence[Segment] = segments, requests: Sequence[SampleRequest] = requests) -> None:
                sampler.sample(runner.run(segments), requests)

            points[shape.num_rows] = _median_seconds(step)
            for segment in segments:
                runner.blocks.free(list(segment.block_table))
    rows = sorted(points)
    # More rows never take less time: such noise would make large steps negative, as curves are extrapolated.
    return tuple(zip(rows, itertools.accumulate((points[count] for count in rows), max), strict=True))


@dataclass(frozen=True, slots=True)
class _Shape:
    """Shape of a step: sequences with the same number of drafts, and possibly a prompt."""

    num_seqs: int
    depth: int
    prompt_tokens: int = 0

    @property
    def num_rows(self) -> int:
        return self.num_seqs * (1 + self.depth) + self.prompt_tokens

    def segments(
        self, runner: ModelRunner, context: int, params: SamplingParams
    ) -> tuple[list[Segment], list[SampleRequest]]:
        segments, requests = [], []
        for index in range(self.num_seqs):
            rows = 1 + self.depth
            segments.append(Segment([0] * rows, context, _blocks(runner, context + rows), rows))
            key = NoiseKey.derive(index, 0)
            requests.append(SampleRequest(params, key, [0] * (context + 1), 1, rows, [0] * self.depth))
        if self.prompt_tokens:
            table = _blocks(runner, self.prompt_tokens)
            segments.append(Segment([0] * self.prompt_tokens, 0, table, 1))
            requests.append(SampleRequest(params, NoiseKey.derive(-1, 0), [0] * self.prompt_tokens, 1))
        return segments, requests


def _blocks(runner: ModelRunner, num_tokens: int) -> Sequence[int]:
    table = runner.blocks.allocate(runner.blocks.num_blocks_for(num_tokens))
    if table is None:
        raise ConfigurationError(
            f"{runner.blocks.num_blocks} KV blocks are too few for the sequences: raise target.kv_cache_bytes"
        )
    return table


def _time_draft(config: Config, loads: Sequence[ExpectedLoad], temperature: float) -> list[Points]:
    prepare_process(config.draft)
    drafter = make_drafter(config)
    return [_draft_points(drafter, load, temperature) for load in loads]


def _draft_points(drafter: Drafter, load: ExpectedLoad, temperature: float) -> Points:
    context, num_steps = int(load.mean_context), _WARM_UP + _REPEATS
    params = SamplingParams(temperature=temperature)

    def sequence(index: int, num_tokens: int) -> DraftSequence:
        token_ids = [(31 * index + 7 * place) % drafter.vocab_size for place in range(num_tokens)]
        own = DraftSequence(token_ids, num_tokens, params, NoiseKey.derive(index, 0), num_steps, 4 * num_steps)
        if not drafter.admit(own):
            raise ConfigurationError(
                f"the draft has no room for {load.num_seqs} sequences of {num_tokens} tokens: raise "
                "draft.kv_cache_bytes or draft.max_num_seqs"
            )
        return own

    sequences = [sequence(index, context) for index in range(load.num_seqs)]

    def step() -> None:
        for one in sequences:
            one.to_extend = [one.tip]
        drafter.draft(sequences)

    while any(one.num_drafted == 0 and not one.is_exhausted for one in sequences):
        step()
    seconds = _median_seconds(step)
    points = [(load.num_seqs, seconds)]
    sequences.append(sequence(load.num_seqs, load.prompt_tokens))
    started_at = time.perf_counter()
    step()
    points.append((load.num_seqs + load.prompt_tokens, max(seconds, time.perf_counter() - started_at)))
    for one in sequences:
        drafter.release(one)
    return tuple(points)


def _median_seconds(step: Callable[[], None]) -> float:
    for _ in range(_WARM_UP):
        step()
    seconds: list[float] = []
    while len(seconds) < _REPEATS and sum(seconds) < _MAX_SECONDS:
        started_at = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started_at)
    return statistics.median(seconds)
