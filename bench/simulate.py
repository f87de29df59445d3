"""Compares `outrider simulate` with clusters that run, and times a larger one: `python -m bench.simulate`.

Three clusters on this machine answer requests for a while. Their engines are simulated, and all else is real (router,
gRPC, coordinators, draft workers, HTTP clients). Each is also simulated with requests of the same lengths, and with a
rate at the same times. Compared are tokens per second, p50 and p99 of whole answers, and the mean k. The simulation's
figures are medians over several seeds.

The programs' own time between steps (`cluster.planning.overheads`) is measured first: gaps between tokens of one and
several streams, plain and with drafts, in steps of one length.

The larger cluster is an eighth of one with 32 targets, 16 draft workers and 3,200 streams: 4 targets, 2 draft workers
and 400 streams, for ten minutes of virtual time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from bench.in_process import SIMULATED
from bench.result import describe_machine, write_result
from bench.workload import read_counters
from cluster.config import Config
from cluster.config.file import load_config
from cluster.simulator.cluster import MeasuredSpan, SimulatedCluster
from cluster.simulator.figures import Figures, Percentiles
from cluster.simulator.hardware import num_kv_blocks
from cluster.simulator.report import table, to_json
from cluster.simulator.traffic import Arrival, ClosedTraffic, EndedRequest, Lengths, OpenTraffic, Traffic
from services.launch.local import LocalCluster

BAR = 0.1
PARTS = ("overheads", "real", "simulated", "large")
READY_SECONDS = 120.0
_GAP_MS, _GAP_SECONDS = 12.0, 12.0
_SEED = 1
_NUM_SEEDS = 5
_MOST_STREAMS = 64  # of requests that come at a rate: as many as may be under way
_STEPS = "simulation.target_step_ms=[[1,30],[16,36],[32,42],[64,60],[128,100],[512,400]]"
_DRAFT = "simulation.draft_step_ms=[[1,2],[16,3]]"
_SLOW_DRAFT = "simulation.draft_step_ms=[[1,6],[16,10]]"
LARGE = (
    "target.replicas=4",
    "target.max_num_seqs=352",
    "target.max_num_batched_tokens=2048",
    "draft.replicas=2",
    "draft.max_num_seqs=1024",
    "draft.max_num_batched_tokens=2048",
    "simulation.target_step_ms=[[1,14],[128,16],[320,24],[640,34],[1280,58],[2048,90]]",
    "simulation.draft_step_ms=[[1,2],[64,2.5],[512,6],[1024,10]]",
    "simulation.acceptance=0.78",
    "simulation.round_trip_ms=0.5",
)
LARGE_BLOCKS = 24_000
LARGE_STREAMS = 400


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    settings: tuple[str, ...]
    answers: Lengths
    prompts: Lengths = field(default_factory=lambda: Lengths(16, 48))
    num_streams: int | None = None
    requests_per_second: float | None = None

    def config(self) -> Config:
        own = ["router.port=0", "logging.level=error", "target.enable_prefix_caching=false", *self.settings]
        return load_config(None, [*SIMULATED, *own])

    def traffic(self, seconds: float, seed: int) -> Traffic:
        if self.num_streams is not None:
            return ClosedTraffic(self.num_streams, seconds, self.prompts, self.answers, seed)
        assert self.requests_per_second is not None
        return OpenTraffic(self.requests_per_second, seconds, self.prompts, self.answers, seed)


CASES = (
    Case("light, 2 requests/s, 1 target", (_STEPS, _DRAFT), Lengths(32, 96), requests_per_second=2.0),
    Case("saturated, 16 streams, 1 target", (_STEPS, _DRAFT), Lengths(48, 80), num_streams=16),
    Case(
        "12 streams, 2 targets, 1 slow draft",
        (_STEPS, _SLOW_DRAFT, "target.replicas=2"),
        Lengths(48, 80),
        num_streams=12,
    ),
)


@dataclass(frozen=True, slots=True)
class Result:
    """Latencies in seconds."""

    tokens_per_second: float
    latency_p50: float
    latency_p99: float
    mean_k: float
    first_token_p50: float
    per_output_token_p50: float
    acceptance: float
    num_requests: int

    @classmethod
    def of(cls, figures: Figures, warm_up: float) -> Result:
        latency, first, each = figures.latency, figures.first_token, figures.per_output_token
        assert latency is not None
        assert first is not None
        assert each is not None
        return cls(
            figures.tokens_per_second,
            latency.p50,
            latency.p99,
            figures.mean_k,
            first.p50,
            each.p50,
            figures.acceptance,
            figures.num_finished,
        )


COMPARED = ("tokens_per_second", "latency_p50", "latency_p99", "mean_k")


@dataclass(frozen=True, slots=True)
class Answer:
    asked_at: float
    times: Sequence[float]  # of its pieces
    counts: Sequence[int]  # tokens in them


def ask(url: str, traffic: Traffic, num_streams: int, started_at: float) -> list[Answer]:
    """Sends the requests of `traffic` at their times, or, where they follow one another, as soon as one has ended."""
    arrivals, lock = traffic.arrivals(), threading.Lock()
    answers: list[Answer] = []
    limits = httpx.Limits(max_connections=num_streams)

    def next_one(before: Arrival | None) -> Arrival | None:
        with lock:
            ended = None if before is None else EndedRequest(before, time.perf_counter() - started_at)
            following = None if ended is None else traffic.after(ended)
            return following or next(arrivals, None)

    def stream() -> None:
        arrival = None
        while (arrival := next_one(arrival)) is not None:
            time.sleep(max(0.0, started_at + arrival.seconds - time.perf_counter()))
            answer = _answer(client, arrival)
            with lock:
                answers.append(answer)

    with httpx.Client(base_url=url, timeout=600, limits=limits) as client:
        threads = [threading.Thread(target=stream) for _ in range(num_streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return answers


def _answer(client: httpx.Client, arrival: Arrival) -> Answer:
    body = {
        "prompt": [100 + 31 * place % 1000 for place in range(arrival.prompt_tokens)],
        "max_tokens": arrival.answer_tokens,
        "temperature": 1.0,
        "stream": True,
        "return_token_ids": True,
    }
    asked_at, times, counts = time.perf_counter(), [], []
    with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                number = len(choices[0].get("token_ids") or ()) if choices else 0
                if number:
                    times.append(time.perf_counter())
                    counts.append(number)
    return Answer(asked_at, times, counts)


def measure(case: Case, seconds: float, warm_up: float) -> Result:
    with LocalCluster(case.config()) as cluster:
        cluster.wait_ready(READY_SECONDS)
        ask(cluster.url, ClosedTraffic(1, 1.0, Lengths(8, 8), Lengths(8, 8), 0), 1, time.perf_counter())
        counters: list[dict[str, float]] = []
        started_at = time.perf_counter()

        def count() -> None:
            for at in (warm_up, seconds):
                time.sleep(max(0.0, started_at + at - time.perf_counter()))
                counters.append(read_counters(f"{cluster.url}/metrics"))

        counting = threading.Thread(target=count)
        counting.start()
        answers = ask(cluster.url, case.traffic(seconds, _SEED), case.num_streams or _MOST_STREAMS, started_at)
        counting.join()
    begins, ends = started_at + warm_up, started_at + seconds
    num_tokens = sum(
        number
        for answer in answers
        for at, number in zip(answer.times, answer.counts, strict=True)
        if begins <= at <= ends
    )
    # In virtual time a closed run is cut off, so that answers that are late are missing at its end.
    counted = [a for a in answers if a.asked_at >= begins and (case.num_streams is None or a.times[-1] <= ends)]
    latency = Percentiles.of(np.array([a.times[-1] - a.asked_at for a in counted]))
    first = Percentiles.of(np.array([a.times[0] - a.asked_at for a in counted]))
    each = Percentiles.of(np.array([(a.times[-1] - a.times[0]) / (sum(a.counts) - 1) for a in counted]))
    assert latency is not None
    assert first is not None
    assert each is not None

    def change(name: str) -> float:
        return counters[1][name] - counters[0].get(name, 0.0)

    drafts = change("vllm:spec_decode_num_draft_tokens_total")
    accepted = change("vllm:spec_decode_num_accepted_tokens_total")
    rounds = change("vllm:generation_tokens_total") - accepted
    return Result(
        num_tokens / (seconds - warm_up),
        latency.p50,
        latency.p99,
        drafts / rounds,
        first.p50,
        each.p50,
        accepted / max(drafts, 1.0),
        len(answers),
    )


def simulate(case: Case, seconds: float, warm_up: float) -> Iterator[Result]:
    config = case.config()
    for seed in range(_NUM_SEEDS):
        is_cut = case.num_streams is not None
        traffic = case.traffic(seconds, _SEED + (seed if is_cut else 0))
        span = MeasuredSpan(warm_up, seconds, is_cut=is_cut)
        cluster = SimulatedCluster(config, traffic, num_kv_blocks(config, None, None), span, seed)
        cluster.run()
        yield Result.of(cluster.figures(), warm_up)


def measure_overheads() -> dict[str, float]:
    """Milliseconds, as the fields of `cluster.planning.overheads`."""
    plain = ("speculation.num_speculative_tokens=0",)
    drafted = ("speculation.controller=fixed", "speculation.max_run_ahead=0", "simulation.draft_step_ms=[[1,1]]")
    one, first = _gap(plain, 1)
    many, _ = _gap(plain, 16)
    deep, _ = _gap(drafted, 1)
    shallow, _ = _gap((*drafted, "speculation.num_speculative_tokens=1"), 1)
    several, _ = _gap(drafted, 8)
    sequence = (many - one) / 15
    step = one - _GAP_MS - sequence
    draft_step = (deep - shallow - 3.0) / 3  # three draft steps of 1 ms
    found = {
        "target.step": step,
        "target.sequence": sequence,
        "draft.step": draft_step,
        "draft.sequence": (several - deep - 7 * sequence) / (7 * 4),
        "hand_over": (shallow - _GAP_MS - 1.0 - step - sequence - draft_step) / 2,
        "router + answer": first - one,
    }
    print("ms: " + ", ".join(f"{name} {value:.3f}" for name, value in found.items()) + "\n", flush=True)
    return found


def _gap(settings: Sequence[str], num_streams: int) -> tuple[float, float]:
    """Median milliseconds between pieces of answers, and until the first."""
    steps = f"simulation.target_step_ms=[[1,{_GAP_MS}]]"
    case = Case("", (steps, *settings), Lengths(400, 400), Lengths(16, 16), num_streams)
    with LocalCluster(case.config()) as cluster:
        cluster.wait_ready(READY_SECONDS)
        answers = ask(cluster.url, case.traffic(_GAP_SECONDS, 0), num_streams, time.perf_counter())
    gaps = [after - before for answer in answers for before, after in itertools.pairwise(answer.times)]
    first = [answer.times[0] - answer.asked_at for answer in answers]
    return 1e3 * statistics.median(gaps), 1e3 * statistics.median(first)


def median_of(results: Sequence[Result]) -> Result:
    values = {name: statistics.median(getattr(one, name) for one in results) for name in Result.__slots__}
    return Result(**values)


def run_large(seconds: float) -> dict[str, Any]:
    config = load_config(None, [*SIMULATED, *LARGE])
    traffic = ClosedTraffic(LARGE_STREAMS, seconds, Lengths(128, 384), Lengths(128, 384), _SEED, ramp_seconds=20.0)
    cluster = SimulatedCluster(config, traffic, LARGE_BLOCKS, MeasuredSpan(60.0, seconds, 30.0, is_cut=True), _SEED)
    started_at = time.perf_counter()

    def show(at: float) -> None:
        if int(at) % 10 == 0:
            took = time.perf_counter() - started_at
            print(f"\r{at:.0f} s of {seconds:.0f} in {took:.0f} s", end="", file=sys.stderr, flush=True)

    cluster.run(show)
    took = time.perf_counter() - started_at
    figures = cluster.figures()
    print(f"\n{table(figures)}\n")
    print(
        f"{seconds:g} s of {LARGE_STREAMS} streams in {took:.0f} s: {cluster.recorder.num_steps} steps of targets, "
        f"{cluster.recorder.num_draft_steps} of draft workers, {cluster.recorder.num_tokens} tokens"
    )
    return {
        "settings": LARGE,
        "streams": LARGE_STREAMS,
        "simulated_seconds": seconds,
        "took_seconds": took,
        "target_steps": cluster.recorder.num_steps,
        "draft_steps": cluster.recorder.num_draft_steps,
        "tokens": cluster.recorder.num_tokens,
        "figures": to_json(figures),
    }


def compare(document: dict[str, Any]) -> float:
    """Simulates what `document` has of clusters that ran; returns by how much the worst figure is off."""
    worst, real = 0.0, document["real"]
    document["simulated"] = cases = {}
    print("| | | tokens/s | whole answer p50 | p99 | mean k | first token p50 | per output token p50 | requests |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for case in CASES:
        measured = Result(**real["cases"][case.name])
        every = list(simulate(case, real["seconds"], real["warm_up"]))
        simulated = median_of(every)
        off = {name: getattr(simulated, name) / getattr(measured, name) - 1 for name in COMPARED}
        worst = max(worst, *map(abs, off.values()))
        for kind, result in (("ran", measured), ("simulated", simulated)):
            print(_row(case.name, kind, result))
        print(f"| | off by | {' | '.join(f'{value:+.1%}' for value in off.values())} | | | |", flush=True)
        cases[case.name] = {"settings": case.settings, "seeds": [asdict(one) for one in every], "off": off}
    print(f"\nat most {worst:.1%} off ({'within' if worst <= BAR else 'beyond'} the bar of {BAR:.0%})\n", flush=True)
    return worst


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.simulate", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is left out is as in --out")
    parser.add_argument("--seconds", type=float, default=100.0, help="of a cluster that runs")
    parser.add_argument("--warm-up", type=float, default=15.0)
    parser.add_argument("--large-seconds", type=float, default=600.0)
    parser.add_argument("--out", type=Path, default=Path("bench/results/simulate.json"))
    arguments = parser.parse_args(argv)
    document = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {}
    document["machine"] = describe_machine()
    seconds, warm_up, worst = arguments.seconds, arguments.warm_up, 0.0
    if "overheads" in arguments.parts:
        document["overheads_ms"] = measure_overheads()
    if "real" in arguments.parts:
        document["real"] = {"seconds": seconds, "warm_up": warm_up}
        document["real"]["cases"] = {case.name: asdict(measure(case, seconds, warm_up)) for case in CASES}
    if "simulated" in arguments.parts:
        worst = compare(document)
    if "large" in arguments.parts:
        document["large"] = run_large(arguments.large_seconds)
    write_result(arguments.out, document)
    return int(worst > BAR)


def _row(name: str, kind: str, result: Result) -> str:
    cells = [
        name,
        kind,
        f"{result.tokens_per_second:.1f}",
        f"{1e3 * result.latency_p50:.0f} ms",
        f"{1e3 * result.latency_p99:.0f} ms",
        f"{result.mean_k:.2f}",
        f"{1e3 * result.first_token_p50:.0f} ms",
        f"{1e3 * result.per_output_token_p50:.1f} ms",
        f"{result.num_requests:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
