"""Tables of drafters, trees and the engine's steps on CPUs."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from bench.report.page import Results, markdown
from bench.speedup import AUTO
from bench.trees import KINDS

_COMPARED_DEPTH = "3"
_HEADS = {
    "model": "2M",
    "parallel=parallel": "parallel",
    "eagle=eagle": "EAGLE-1",
    "eagle=eagle3": "EAGLE-3",
    "medusa=medusa": "Medusa",
    "ngram": "n-gram",
}


def drafters(results: Results) -> str:
    cells: dict[str, dict[tuple[str, float], str]] = {}
    for name in ("drafters.json", "drafters-smollm2.json"):
        for point in results.read(name)["points"]:
            cells.setdefault(point["drafter"], {})[name, point["temperature"]] = _drafter(point)
    columns = list(itertools.product(("drafters.json", "drafters-smollm2.json"), (0.0, 1.0)))
    titles = ["190M, T=0", "T=1", "135M instruct, T=0", "T=1"]
    rows = [[name, *(own.get(column, "") for column in columns)] for name, own in cells.items()]
    return markdown(["drafter", *titles], rows)


def _drafter(point: Mapping[str, Any]) -> str:
    speedups = {name: statistics.median(depth["speedups"]) for name, depth in point["depths"].items()}
    best = max([1.0, *(speedup for name, speedup in speedups.items() if name != "auto")])
    accepted = point["depths"][_COMPARED_DEPTH]["acceptance_rate"]
    return f"{speedups['auto']:.2f}/{best:.2f}/{accepted:.2f}"


def heads(results: Results) -> str:
    coupled = _of_one_stream(results, "drafters-190m-heads.json")
    greedy = _of_one_stream(results, "drafters-190m-greedy.json")
    rows = [
        [title, *(coupled[name, temperature] for temperature in (0.0, 0.7, 1.0)), greedy[name, 1.0]]
        for name, title in _HEADS.items()
    ]
    return markdown(["drafter", "T=0", "0.7", "1", "1, greedy"], rows)


def _of_one_stream(results: Results, name: str) -> dict[tuple[str, float], str]:
    """Returns the tokens per round and the speedup at the compared depth, by drafter and temperature."""
    cells = {}
    for point in results.read(name)["points"]:
        if point["num_streams"] == 1:
            depth = point["depths"][_COMPARED_DEPTH]
            cell = f"{depth['acceptance_length']:.2f}/{statistics.median(depth['speedups']):.2f}"
            cells[point["drafter"], point["temperature"]] = cell
    return cells


def trees(results: Results) -> str:
    rows = []
    for point in results.read("trees.json")["points"]:
        cells: dict[str, dict[str, str]] = {}
        for setting in point["settings"]:
            speed = statistics.median(setting["tokens_per_second"])
            cell = f"{setting['tokens_per_round']:.2f}/{speed:.0f}"
            cells.setdefault(setting["nodes"], {})[setting["kind"]] = cell
        for nodes, own in cells.items():
            if nodes != AUTO:
                rows.append([f"{point['temperature']:g}", nodes, *(own[kind] for kind in KINDS)])
    return markdown(["T", "nodes", *KINDS], rows)


def agents(results: Results) -> str:
    found: dict[tuple[str, float], dict[str, Mapping[str, Any]]] = {}
    for one in results.read("agents.json")["results"]:
        found.setdefault((one["workload"], one["temperature"]), {})[one["way"]] = one
    ways = list(next(iter(found.values())))
    rows = []
    for (workload, temperature), own in found.items():
        plain = own["none"]["tokens_per_second"]
        cells = (f"{own[way]['tokens_a_round']:.2f}/{own[way]['tokens_per_second'] / plain:.2f}" for way in ways[1:])
        rows.append([workload, f"{temperature:g}", *cells])
    return markdown(["workload", "T", *ways[1:]], rows)


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


TABLES: dict[str, Callable[[Results], str]] = {
    "drafters": drafters,
    "heads": heads,
    "agents": agents,
    "trees": trees,
    "engine": engine,
}
