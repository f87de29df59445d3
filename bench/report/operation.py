"""Tables of faults, restarts, and of the router."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.report.page import Results, markdown

_FAULTS = {
    "simulated engines": "faults-simulated.json",
    "the bundled pair": "faults-torch.json",
    "simulated engines on Ray": "faults-simulated-ray.json",
}


def faults(results: Results) -> str:
    rows = []
    for name, file in _FAULTS.items():
        own = results.read(file)["rows"]
        totals = [sum(row[key] for row in own) for key in _COUNTS]
        longest = max(row["longest_pause"] for row in own)
        rows.append([name, len(own) - 1, *totals, f"{longest:.1f}"])
    soak = results.read("soak.json")
    counts = [soak["sent"], soak["failed"], soak["asked_again"], soak["different_tokens"]]
    rows.append(["half an hour of faults at random", sum(soak["faults"].values()), *counts, ""])
    head = ["cluster", "faults", "requests", "failed", "asked again", "different tokens", "longest pause, s"]
    return markdown(head, rows)


_COUNTS = ("num_sent", "num_failed", "num_asked_again", "num_different_tokens")


def pauses(results: Results) -> str:
    both = [results.read(_FAULTS[name])["rows"] for name in ("simulated engines", "the bundled pair")]
    cells: dict[str, dict[str, str]] = {}
    for own, other in zip(*both, strict=True):
        assert (own["fault"], own["victim"]) == (other["fault"], other["victim"])
        if own["victim"]:
            seconds = f"{own['longest_pause']:.1f}/{other['longest_pause']:.1f}"
            cells.setdefault(own["fault"], {})[own["victim"]] = seconds
    victims = ("target", "draft", "router")
    return markdown(
        ["fault", *victims], ([fault, *(own[victim] for victim in victims)] for fault, own in cells.items())
    )


def streams(results: Results) -> str:
    rows = [
        (
            f"{one['num_streams']:,}",
            f"{one['chunks_per_second']:,.0f}",
            one["num_lost"],
            f"{one['cpu_us_per_chunk']:.0f}",
            *(f"{one[key]['p50']:.0f}/{one[key]['p99']:.0f}" for key in ("late_ms", "first_ms")),
        )
        for one in results.read("streams.json")["results"]
    ]
    head = ["streams", "chunks/s", "lost", "router CPU a chunk, µs", "late, ms", "added to the first token, ms"]
    return markdown(head, rows)


_ARMS = ("least loaded", "hash alone", "prefix scorer", "router")


def affinity(results: Results) -> str:
    cells: dict[tuple[str, float, float, int], dict[str, list[Any]]] = {}
    for cell in results.read("affinity.json")["cells"]:
        scenario = cell["scenario"]
        key = scenario["workload"], scenario["load"], scenario["working_set"], scenario["routers"]
        cells.setdefault(key, {}).setdefault(cell["case"]["arm"], []).append(cell)
    rows = []
    for (workload, load, working_set, routers), own in cells.items():
        if workload == "conversations":
            workload = f"{load:g}, {working_set:g}, {routers}"
        rows.append([workload, *(_first_tokens(own[arm]) for arm in _ARMS)])
    return markdown(["load, working set, routers", *_ARMS], rows)


def _first_tokens(cells: Sequence[Mapping[str, Any]]) -> str:
    p50, p99 = (1e3 * statistics.median(cell[f"first_token_{name}"] for cell in cells) for name in ("p50", "p99"))
    hits = statistics.median(cell["hits"] for cell in cells)
    return f"{p50:.0f}/{p99:.0f}" + (f" ({hits:.2f})" if hits else "")


def neighbours(results: Results) -> str:
    one, four = (results.read(file)["cells"] for file in ("neighbours.json", "neighbours-4-keys.json"))
    rows = [
        [own["neighbour"], *(f"{cell['first_p50']:.0f}/{cell['first_p99']:.0f}" for cell in (own, other))]
        for own, other in zip(one, four, strict=True)
    ]
    return markdown(["neighbour", "one key, 30 %", "four keys, 70 %"], rows)


TABLES: dict[str, Callable[[Results], str]] = {
    "faults": faults,
    "pauses": pauses,
    "streams": streams,
    "affinity": affinity,
    "neighbours": neighbours,
}
