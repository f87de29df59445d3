"""Tables of the engine's steps on CPUs, and of the simulator."""

from __future__ import annotations

import statistics
from collections.abc import Callable

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
    "simulate": simulate,
}
