"""Tables of the engine's steps on CPUs, and of the planner, doctor, tuner and simulator."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Callable

from bench import plan as plan_bench
from bench.report.page import Results, markdown, percent

_ENGINES = {"Sapphire Rapids": "engine.json", "Zen 4": "engine-zen4.json", "Zen 5": "engine-zen5.json"}
_SHAPES = ((1, 1), (1, 16), (1, 64), (64, 1))  # sequences, rows of each


def engine(results: Results) -> str:
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for processor, name in _ENGINES.items():
        times: dict[tuple[str, str], dict[tuple[int, int], float]] = {}
        for step in results.read(name)["steps"]:
            shape = step["num_sequences"], step["num_tokens"]
            times.setdefault((step["weights"], step["instructions"]), {})[shape] = step["milliseconds"]
        for key, own in times.items():
            cells.setdefault(key, {})[processor] = "/".join(f"{own[shape]:.1f}" for shape in _SHAPES)
    rows = [[*key, *(own.get(processor, "") for processor in _ENGINES)] for key, own in cells.items()]
    return markdown(["weights", "instructions", *_ENGINES], rows)


def plan(results: Results) -> str:
    cells: dict[int, dict[str, str]] = {}
    for case in results.read("plan.json")["cases"]:
        own = plan_bench.Case(*(case[key] for key in ("num_streams", "depth", "acceptance", "predicted", "measured")))
        predicted, measured = map(statistics.median, (own.predicted, own.measured))
        cells.setdefault(own.num_streams, {})[f"k = {own.depth}"] = f"{predicted:.0f}/{measured:.0f} ({own.ratio:.2f})"
    titles = list(next(iter(cells.values())))
    return markdown(["streams", *titles], ([streams, *own.values()] for streams, own in cells.items()))


def doctor(results: Results) -> str:
    rows = []
    for sickness, of_sickness in itertools.groupby(
        results.read("doctor.json")["sick"], key=lambda one: one["sickness"]
    ):
        own = list(of_sickness)
        first = [(one["report"]["findings"] or [{"name": "", "loss": None}])[0] for one in own]
        cells = (
            [one["strength"] for one in own],
            [f"{one['loss']:.2f}" for one in own],
            ["none" if finding["loss"] is None else f"{finding['loss']:.2f}" for finding in first],
            ["yes" if finding["name"] == sickness else "no" for finding in first],
        )
        rows.append([sickness, *map(", ".join, cells)])
    return markdown(["sickness", "strengths", "loss", "predicted", "named first"], rows)


def tune(results: Results) -> str:
    rows = []
    for cluster in results.read("tune.json")["clusters"]:
        for trial in cluster["trials"]:
            found = re.fullmatch(r"(.+): ([\d.]+) times \((\S+) to (\S+)\), kept", trial)
            if found is not None:
                change, ratio, low, high = found.groups()
                rows.append([cluster["sickness"], f"`{change}`", f"{ratio} ({low}-{high})"])
    return markdown(["cluster", "kept change", "ratio (range)"], rows)


def simulate(results: Results) -> str:
    document = results.read("simulate.json")
    rows = []
    for name, ran in document["real"]["cases"].items():
        simulated = document["simulated"][name]
        speed = statistics.median(seed["tokens_per_second"] for seed in simulated["seeds"])
        off = [percent(simulated["off"][key]) for key in ("tokens_per_second", "latency_p50", "latency_p99")]
        rows.append([name, f"{ran['tokens_per_second']:.0f}/{speed:.0f}", *off])
    head = ["case", "tokens/s ran, simulated", "off by", "latency p50", "p99"]
    return markdown(head, rows)


TABLES: dict[str, Callable[[Results], str]] = {
    "engine": engine,
    "plan": plan,
    "doctor": doctor,
    "tune": tune,
    "simulate": simulate,
}
