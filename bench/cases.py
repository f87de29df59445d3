"""Measures how many clients a target serves within latency limits, by draft placement: `python -m bench.capacity`.

A 70B target on 4 A100 and a 1B draft run as simulated engines, whose steps take the time that the planner's formulae
predict (`cluster.planning`). They run without speculation, with the draft on the target's GPUs, and with a pool of A10G
at several round trips. On the target's GPUs k is the planner's and fixed, and nothing overlaps, as there is no
run-ahead. With a pool the controller chooses k. Scheduler, rounds, wire and draft workers are real, and draft workers
are programs of their own. The planner's prediction is printed next to each figure.

All times, round trips included, are stretched by `--scale`, so that Python's own time on this machine counts for less;
results are divided by it. A run sleeps nearly all the time (*cores* shows its use), so several run at once. Clients
send their next request within a step. Their prompts have one length, and their answers 0.5 to 1.5 times a mean length.

The largest number of clients within the limits is interpolated between the numbers that were run. "At equal dollars"
multiplies it by the price of a target alone over the price with its draft: one A10G a target, though an A10G of a pool
may serve more.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import multiprocessing
import queue
import random
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.in_process import SIMULATED, SimulatedCluster
from bench.result import describe_machine, write_result
from bench.workload import p99
from cluster.config import Config
from cluster.config.file import load_config
from cluster.engine.memory_plan import PlannedModel
from cluster.planning.hardware import GpuGroup, parse_gpus
from cluster.planning.prediction import ExpectedLoad, Option, Plan, most_sequences, plan
from cluster.planning.round_costs import RUN_AHEAD_HIDES, Drafting
from cluster.planning.steps import Roofline, curve_points
from cluster.targets.base import GenerationOutput

ROUND_TRIPS_MS = (0.2, 0.5, 2.0, 10.0)
PLAIN, BESIDE = "no speculation", "draft beside the target"
_ROWS = (1, 8, 16, 32, 64, 80, 96, 112, 128, 144, 160, 192, 256, 512, 1024, 2048, 4096)
_THINK_STEPS = 1  # at most, before a client asks again
_WARM_UP_SHARE = 0.4  # of a run, at its beginning: the controller learns


@dataclass(frozen=True, slots=True)
class Case:
    """A way to place the draft."""

    option: Option
    draft: Roofline | None
    round_trip_ms: float = 0.0

    @property
    def is_beside(self) -> bool:
        return self.option.name == BESIDE

    @property
    def dollars_per_hour(self) -> float:
        assert self.option.target_dollars_per_hour is not None
        return self.option.target_dollars_per_hour + (self.option.draft_dollars_per_hour or 0.0)

    def config(self, load: ExpectedLoad, planned: Plan, scale: float, more: Sequence[str] = ()) -> Config:
        def curve(steps: Roofline) -> list[tuple[int, float]]:
            return [(rows, scale * ms) for rows, ms in curve_points(steps, load.num_seqs, load.mean_context, _ROWS)]

        target = self.option.target
        assert isinstance(target, Roofline)
        depth = planned.round.num_speculative_tokens if self.is_beside else 4
        settings: dict[str, object] = {
            "simulation.target_step_ms": [list(point) for point in curve(target)],
            "simulation.round_trip_ms": scale * self.round_trip_ms,
            "target.max_num_seqs": 2 * load.num_seqs,
            "target.max_num_batched_tokens": load.max_num_batched_tokens,
            "target.kv_cache_bytes": 2**36,  # of blocks that are counted and never filled
            "target.enable_prefix_caching": "false",
            "draft.max_num_seqs": 2 * load.num_seqs,
            "draft.max_num_batched_tokens": load.max_num_batched_tokens,
            "target.max_prefill_ms": 50 * scale,
            "draft.max_prefill_ms": 50 * scale,
            "speculation.draft_timeout_ms": 1000 * scale,
            "speculation.num_speculative_tokens": 0 if self.draft is None else depth,
        }
        if self.draft is not None and self.option.drafting is not None:
            settings["simulation.draft_step_ms"] = [list(point) for point in curve(self.draft)]
            settings["simulation.acceptance"] = self.option.drafting.acceptance_rate
        if self.draft is None or depth == 0:
            settings["draft.replicas"] = 0
        if self.is_beside:
            settings |= {"speculation.controller": "fixed", "speculation.max_run_ahead": 0}
        return load_config(None, [*SIMULATED, *(f"{key}={value}" for key, value in settings.items()), *more])


@dataclass(slots=True)
class Client:
    """Measurements of one request of a client."""

    num_tokens: int
    asked_at: float
    first_at: float = 0.0
    last_at: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between tokens; those of one step come together
    num_drafts: int = 0
    num_rounds: int = 0

    def take(self, output: GenerationOutput, now: float) -> None:
        if not self.first_at:
            self.first_at = now
            self.gaps += [0.0] * (len(output.token_ids) - 1)
        elif output.token_ids:
            self.gaps += [now - self.last_at, *[0.0] * (len(output.token_ids) - 1)]
        self.last_at = now
        self.num_rounds += 1
        self.num_drafts += output.num_draft_tokens


@dataclass(frozen=True, slots=True)
class Figures:
    """Times in ms, as without the scale."""

    tokens_per_second: float
    first_token: float
    first_token_p99: float
    between_tokens: float
    between_tokens_p99: float
    pause_p99: float
    depth: float
    num_answers: int = 0
    cores: float = 0.0  # in use by this process: target, client, links, proxy


@dataclass(frozen=True, slots=True)
class Point:
    num_clients: int
    measured: Figures
    predicted: Figures


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    target = Roofline(PlannedModel.parse(arguments.target), parse_gpus(arguments.target_gpus))
    draft = PlannedModel.parse(arguments.draft)
    cases = make_cases(target, draft, parse_gpus(arguments.draft_gpus), arguments.acceptance)
    points: dict[str, list[Point]] = {}
    print(f"{arguments.target} on {arguments.target_gpus}; {arguments.draft}, acceptance {arguments.acceptance:g}")
    print("\nmeasured / predicted; ms\n")
    print("| | clients | k | tokens/s | first token | p99 | between tokens | p99 | pause p99 | answers | cores |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    runs = [(case, _load(num_clients, arguments)) for case in cases for num_clients in arguments.clients]
    # They sleep nearly all the time; processes, as gRPC is not for forks and threads would share one interpreter.
    with ProcessPoolExecutor(arguments.parallel, mp_context=multiprocessing.get_context("spawn")) as pool:
        under_way = [pool.submit(measure, *run, arguments.seconds, arguments.scale) for run in runs]
        for (case, _), future in zip(runs, under_way, strict=True):
            point = future.result()
            points.setdefault(case.option.name, []).append(point)
            print(_row(case, point), flush=True)
    capacities = [
        _capacity(case, points[case.option.name], limit, arguments) for limit in arguments.limits for case in cases
    ]
    print(f"\n{capacity_table(capacities)}\n")
    print("\n".join(crossings(capacities)))
    result = {
        "machine": describe_machine(),
        "arguments": {key: str(value) for key, value in vars(arguments).items() if key != "out"},
        "points": {name: [asdict(point) for point in own] for name, own in points.items()},
        "capacities": [asdict(one) for one in capacities],
    }
    write_result(arguments.out, result)
    return 0


def make_cases(target: Roofline, draft: PlannedModel, draft_gpus: GpuGroup, acceptance: float) -> list[Case]:
    alone = Option(PLAIN, target, target_dollars_per_hour=target.gpus.dollars_per_hour)
    own, beside = Roofline(draft, draft_gpus), Roofline(draft, target.gpus)

    def option(name: str, drafting: Drafting, dollars: float | None) -> Option:
        return Option(name, target, drafting, alone.target_dollars_per_hour, dollars)

    cases = [Case(alone, None), Case(option(BESIDE, Drafting(beside, acceptance), None), beside)]
    for ms in ROUND_TRIPS_MS:
        drafting = Drafting(own, acceptance, ms / 1e3, RUN_AHEAD_HIDES)
        cases.append(Case(option(f"pool, {ms:g} ms away", drafting, draft_gpus.dollars_per_hour), own, ms))
    return cases


def measure(case: Case, load: ExpectedLoad, seconds: float, scale: float) -> Point:
    planned = plan(case.option, load)
    config = case.config(load, planned, scale)
    with SimulatedCluster(config, drafts_apart=True) as cluster:
        run = Run(cluster, load, scale * planned.round.seconds)
        run.go(seconds)
    waits = planned.latency
    predicted = Figures(
        planned.tokens_per_second,
        *(1e3 * one for one in (waits.first_token, waits.first_token_p99)),
        *(1e3 * one for one in (waits.between_tokens, waits.between_tokens_p99, waits.pause_p99)),
        planned.round.num_speculative_tokens,
    )
    return Point(load.num_seqs, run.figures(scale), predicted)


class Run:
    """Clients of one cluster, all in the main thread."""

    def __init__(self, cluster: SimulatedCluster, load: ExpectedLoad, round_seconds: float) -> None:
        self._cluster = cluster
        self._load = load
        self._round_seconds = round_seconds
        self._random = random.Random(0)
        self._steps: queue.SimpleQueue[tuple[float, Sequence[GenerationOutput]]] = queue.SimpleQueue()
        self._running: dict[str, Client] = {}
        self._done: list[Client] = []
        self._num_tokens = 0  # since the warm-up
        self._seconds = 0.0
        self._cores = 0.0

    def go(self, seconds: float) -> None:
        self._cluster.on_step = lambda outputs: self._steps.put((time.perf_counter(), outputs))
        started_at = time.perf_counter()
        measured_from, ends_at = started_at + _WARM_UP_SHARE * seconds, started_at + seconds
        # Not all at once, or answers would end, and prompts come, at once ever after.
        due = [started_at + self._random.random() * 0.5 * _WARM_UP_SHARE * seconds for _ in range(self._load.num_seqs)]
        heapq.heapify(due)
        used = 0.0
        while (now := time.perf_counter()) < ends_at:
            if not used and now >= measured_from:
                used = _processor_seconds()
            while due and due[0] <= now:
                heapq.heappop(due)
                self._ask(now)
            wake_at = min([ends_at, *due[:1]])
            try:
                at, outputs = self._steps.get(timeout=max(0.0, wake_at - time.perf_counter()))
            except queue.Empty:
                continue
            for output in outputs:
                self._take(output, at, measured_from, due)
        self._seconds = ends_at - measured_from
        self._cores = (_processor_seconds() - used) / self._seconds
        for name in list(self._running):
            self._cluster.abort(name)

    def _ask(self, now: float) -> None:
        mean = self._load.answer_tokens
        num_tokens = self._random.randint(mean // 2, mean + mean // 2)
        name = self._cluster.submit(num_tokens, prompt_len=self._load.prompt_tokens)
        self._running[name] = Client(num_tokens, now)

    def _take(self, output: GenerationOutput, at: float, measured_from: float, due: list[float]) -> None:
        client = self._running.get(output.request_id)
        if client is None:
            return
        client.take(output, at)
        if at >= measured_from:
            self._num_tokens += len(output.token_ids)
        if output.finish_reason is not None:
            del self._running[output.request_id]
            if client.first_at >= measured_from:
                self._done.append(client)
            heapq.heappush(due, at + self._random.random() * _THINK_STEPS * self._round_seconds)

    def figures(self, scale: float) -> Figures:
        first = [1e3 / scale * (client.first_at - client.asked_at) for client in self._done]
        between = [1e3 / scale * (c.last_at - c.first_at) / (c.num_tokens - 1) for c in self._done]
        gaps = [1e3 / scale * gap for client in self._done for gap in client.gaps]
        num_rounds = sum(client.num_rounds for client in self._done)
        return Figures(
            tokens_per_second=scale * self._num_tokens / self._seconds,
            first_token=statistics.median(first),
            first_token_p99=p99(first),
            between_tokens=statistics.median(between),
            between_tokens_p99=p99(between),
            pause_p99=p99(gaps),
            depth=sum(client.num_drafts for client in self._done) / num_rounds,
            num_answers=len(self._done),
            cores=self._cores,
        )


@dataclass(frozen=True, slots=True)
class Limit:
    first_token_p99_ms: float
    between_tokens_p99_ms: float

    def __str__(self) -> str:
        return f"{self.first_token_p99_ms:g} / {self.between_tokens_p99_ms:g} ms"


@dataclass(frozen=True, slots=True)
class Capacity:
    """The most clients of a target within a limit."""

    case: str
    limit: Limit
    measured: float
    is_at_least: bool  # all numbers that were run are within it
    predicted: int
    dollars_per_hour: float
    price_share: float  # of a target alone, of this

    @property
    def at_equal_dollars(self) -> float:
        return self.measured * self.price_share


def most_clients(points: Sequence[Point], limit: Limit) -> tuple[float, bool]:
    """Returns the most clients within the limit, interpolated, and whether all `points` are within it.

    The number is 0 if the first point already exceeds the limit, as nothing is known below it.
    """

    def excess(point: Point) -> float:
        own = point.measured
        return max(own.first_token_p99 / limit.first_token_p99_ms, own.between_tokens_p99 / limit.between_tokens_p99_ms)

    if excess(points[0]) > 1:
        return 0.0, False
    for left, right in itertools.pairwise(points):
        low, high = excess(left), excess(right)
        if high > 1:
            return left.num_clients + (right.num_clients - left.num_clients) * (1 - low) / (high - low), False
    return float(points[-1].num_clients), True


def _capacity(case: Case, points: Sequence[Point], limit: Limit, arguments: argparse.Namespace) -> Capacity:
    measured, is_at_least = most_clients(points, limit)
    predicted = most_sequences(
        case.option,
        _load(1, arguments),
        limit.first_token_p99_ms / 1e3,
        limit.between_tokens_p99_ms / 1e3,
        max(arguments.clients),
    )
    alone = case.option.target_dollars_per_hour
    assert alone is not None
    dollars = case.dollars_per_hour
    return Capacity(case.option.name, limit, measured, is_at_least, predicted, dollars, alone / dollars)


def capacity_table(capacities: Sequence[Capacity]) -> str:
    rows = ["| limit: p99 of first token / between tokens | | clients | predicted | $/h | clients at equal dollars |"]
    rows.append("| --- | --- | --- | --- | --- | --- |")
    for one in capacities:
        sign = ">= " if one.is_at_least else ""
        rows.append(
            f"| {one.limit} | {one.case} | {sign}{one.measured:.0f} | {one.predicted} | {one.dollars_per_hour:g} "
            f"| {sign}{one.at_equal_dollars:.0f} |"
        )
    return "\n".join(rows)


def crossings(capacities: Sequence[Capacity]) -> list[str]:
    """Describes for each limit up to which round trip a pool serves more clients at equal dollars.

    A pool is compared with no speculation and with the draft on the target's GPUs.
    """
    lines = []
    for limit in dict.fromkeys(one.limit for one in capacities):
        own = {one.case: one.at_equal_dollars for one in capacities if one.limit == limit}
        pools = [own[f"pool, {ms:g} ms away"] for ms in ROUND_TRIPS_MS]
        lines += [f"{limit}: {_crossing(pools, own[other])} {other}" for other in (PLAIN, BESIDE)]
    return lines


def _crossing(pools: Sequence[float], other: float) -> str:
    ahead = [number > other for number in pools]
    if all(ahead) or not any(ahead):
        return f"at {'every' if all(ahead) else 'no'} round trip a pool serves more for the money than"
    last = max(index for index, is_ahead in enumerate(ahead) if is_ahead)
    if last + 1 == len(pools):
        return f"up to {ROUND_TRIPS_MS[-1]:g} ms, not at every round trip, a pool serves more for the money than"
    share = (pools[last] - other) / (pools[last] - pools[last + 1])
    ms = ROUND_TRIPS_MS[last] + share * (ROUND_TRIPS_MS[last + 1] - ROUND_TRIPS_MS[last])
    return f"up to a round trip of about {ms:.1f} ms a pool serves more for the money than"


def _load(num_clients: int, arguments: argparse.Namespace) -> ExpectedLoad:
    return ExpectedLoad(num_clients, arguments.prompt_tokens, arguments.answer_tokens)


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _row(case: Case, point: Point) -> str:
    own, planned = point.measured, point.predicted
    pairs = [
        f"{own.depth:.1f} / {planned.depth:g}",
        f"{own.tokens_per_second:.0f} / {planned.tokens_per_second:.0f}",
        *(
            f"{getattr(own, name):.1f} / {getattr(planned, name):.1f}"
            for name in ("first_token", "first_token_p99", "between_tokens", "between_tokens_p99", "pause_p99")
        ),
    ]
    return f"| {case.option.name} | {point.num_clients} | {' | '.join(pairs)} | {own.num_answers} | {own.cores:.2f} |"


def _parser() -> argparse.ArgumentParser:
    def limits(text: str) -> list[Limit]:
        return [Limit(*map(float, pair.split("/"))) for pair in text.split(",")]

    parser = argparse.ArgumentParser(prog="bench.capacity", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", default="70B", metavar="MODEL")
    parser.add_argument("--target-gpus", default="4xA100-80", metavar="GPUS")
    parser.add_argument("--draft", default="1B", metavar="MODEL")
    parser.add_argument("--draft-gpus", default="A10G", metavar="GPUS")
    parser.add_argument("--acceptance", type=float, default=0.82, help="default .82, published of a distilled 1B")
    parser.add_argument("--clients", type=lambda t: [int(n) for n in t.split(",")], default=[8, 16, 32, 48])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--answer-tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run")
    parser.add_argument("--parallel", type=int, default=5, help="runs at a time; default 5")
    parser.add_argument("--scale", type=float, default=3.0, help="of all times; default 3")
    parser.add_argument(
        "--limits",
        type=limits,
        default=[Limit(300, 25), Limit(300, 40)],
        metavar="FIRST/BETWEEN,...",
        help="p99 of the first token and between tokens, ms; default 300/25,300/40",
    )
    parser.add_argument("--out", type=Path, default=Path("bench/results/capacity.json"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
