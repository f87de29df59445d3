"""Tables of remote drafting: pools, networks, coordination; and of the simulator."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from bench.choose import BAR
from bench.coordination import Cost
from bench.report.page import Results, markdown, percent

_DRAFTS = {"1B": "1B", "1B-int4": "1B INT4", "0.5B": "0.5B", "parallel-1B": "parallel 1B"}


def pool(results: Results) -> str:
    cells = _pool_cells(results, card="A10G", delay_ms=0.5)
    loads = [(1, 1), (1, 8), (1, 16), (1, 32), (1, 64), (2, 8), (4, 8), (8, 8)]
    rows = []
    for targets, streams in loads:
        own = {c["draft"]: c for c in cells if (c["targets"], c["streams"]) == (targets, streams)}
        rows.append([f"{targets} x {streams}", *(_pool_cell(own[draft]) for draft in _DRAFTS)])
    document = results.read("pool.json")
    table = markdown(["targets x streams", *_DRAFTS.values()], rows)
    return f"{document['date']}, commit `{document['commit']}`.\n\n{table}"


def _pool_cell(cell: Mapping[str, Any]) -> str:
    waits = f", {cell['waiting_share']:.0%}" if cell["waiting_share"] >= 0.005 else ""
    return f"{_gain(cell):.2f} ({cell['planned']:.2f}{waits})"


def prompts(results: Results) -> str:
    """Returns gains by the length of prompts, with the share of time that targets wait where it is above a tenth."""
    loads, cells, commits = [(1, 8), (1, 32), (4, 8), (4, 32)], {}, []
    for tokens in (500, 2000, 8000):
        document = results.read(f"pool-{tokens}.json")
        commits.append(f"{tokens:,} tokens: {document['date']}, commit `{document['commit']}`")
        for cell in document["cells"]:
            place = cell["draft"], cell["card"], tokens, cell["targets"], cell["streams"]
            waits = f" ({cell['waiting_share']:.0%})" if cell["waiting_share"] > 0.1 else ""
            cells[place] = f"{_gain(cell):.2f}{waits}"
    rows = [
        [f"{_DRAFTS[draft]}, {card}"]
        + [" / ".join(cells[draft, card, tokens, *load] for load in loads) for tokens in (500, 2000, 8000)]
        for draft, card in itertools.product(("1B", "1B-int4", "parallel-1B"), ("A10G", "L4", "L40S"))
    ]
    return f"{'; '.join(commits)}.\n\n{markdown(['draft, GPU', '500', '2,000', '8,000'], rows)}"


def distances(results: Results) -> str:
    places = [("A10G", 0.2), ("A10G", 2.0), ("L4", 0.5), ("L40S", 0.5)]
    rows = []
    for card, delay_ms in places:
        cells = _pool_cells(results, card=card, delay_ms=delay_ms)
        own = {c["draft"]: c for c in cells if (c["targets"], c["streams"]) == (1, 8)}
        rows.append([f"{card}, {delay_ms:g} ms", *(f"{_gain(own[draft]):.2f}" for draft in _DRAFTS)])
    return markdown(["draft GPU, round trip", *_DRAFTS.values()], rows)


def _pool_cells(results: Results, card: str, delay_ms: float) -> list[dict[str, Any]]:
    cells = results.read("pool.json")["cells"]
    return [c for c in cells if (c["card"], c["delay_ms"], c["acceptance"]) == (card, delay_ms, 0.8)]


def _gain(cell: Mapping[str, Any]) -> float:
    return float(cell["tokens_per_second"] / cell["k0"])


def capacity(results: Results) -> str:
    capacities = results.read("capacity.json")["capacities"]
    rows = []
    for limit, of_limit in itertools.groupby(capacities, key=lambda one: one["limit"]):
        cells = (f"{'≥' if one['is_at_least'] else ''}{one['measured']:.0f} ({one['predicted']})" for one in of_limit)
        rows.append([f"{limit['first_token_p99_ms']}, {limit['between_tokens_p99_ms']} ms", *cells])
    return markdown(["limit", *dict.fromkeys(one["case"] for one in capacities)], rows)


def choose(results: Results) -> str:
    """Returns the cells in which another option than the named one is better by more than the bar."""
    document = results.read("choose.json")
    cells = document["cells"]
    lost = [cell for cell in cells if cell["regret"] > BAR]
    rows = []
    for cell in sorted(lost, key=lambda cell: -cell["regret"]):
        asked = cell["asked"]
        limits = asked["first_token_ms"], asked["between_tokens_ms"]
        rows.append(
            [
                asked["workload"],
                f"{asked['target']} on {asked['target_gpus']}, {asked['draft_gpus']}",
                ", ".join("default" if one is None else f"{one:g}" for one in limits),
                cell["named"],
                cell["best"],
                f"{cell['regret']:.0%}",
            ]
        )
    head = ["workload", "GPUs", "limits, ms", "named", "best as simulated", "regret"]
    within = f"{len(cells) - len(lost)} of {len(cells)} cells are within {BAR:.0%}"
    summary = f"{document['date']}, commit `{document['commit']}`: {within}"
    return f"{summary}. The others:\n\n{markdown(head, rows)}" if rows else f"{summary}."


def network(results: Results) -> str:
    rows = [
        (one["case"]["name"], f"{statistics.median(one['speedups']):.2f}", f"{one['mean_depth']:.1f}")
        for one in results.read("network.json")["results"]
    ]
    return markdown(["case", "ratio", "k"], rows)


def coordination(results: Results) -> str:
    costs = [Cost(**cost) for cost in results.read("coordination.json")["costs"]]
    rows = []
    for count, of_count in itertools.groupby(costs, key=lambda cost: cost.num_sequences):
        own = list(of_count)
        values = [
            statistics.median(getattr(cost, name) for cost in own)
            for name in ("critical_ms", "other_ms", "alone_ms", "bar_ms")
        ]
        size = statistics.median(cost.bytes_per_token for cost in own)
        rows.append([count, *(f"{value:.2f}" for value in values), f"{size:.0f}"])
    head = ["sequences", "critical, ms", "other", "back to back", "its bar", "bytes a token"]
    return markdown(head, rows)


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
    "pool": pool,
    "prompts": prompts,
    "distances": distances,
    "capacity": capacity,
    "choose": choose,
    "network": network,
    "coordination": coordination,
    "simulate": simulate,
}
