"""Chains beside trees of as many nodes: `python -m bench.trees`.

One stream. Two clusters run side by side, one with `tree_width` 1; only one of them works at a time, and repeats are
interleaved. The trees are those that the cluster chooses itself from what it measures, while it warms up and on.
Figures are medians with their range; the ratio is the median of the repeats' ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.machine import describe_machine
from bench.speedup import MEASURED, READY_TIMEOUT_SECONDS
from bench.workload import held_out_prompts, read_counters, run_streams
from cluster.config import load_config
from services.launch.local import LocalCluster

DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"


@dataclass(frozen=True, slots=True)
class Point:
    """Chain and tree with one number of nodes at one temperature."""

    num_nodes: int
    temperature: float
    chain_tokens_per_round: float  # committed, the bonus token included
    tree_tokens_per_round: float
    chain_tokens_per_second: list[float]
    tree_tokens_per_second: list[float]

    @property
    def ratios(self) -> list[float]:
        """Tree to chain, one for each repeat."""
        return [a / b for a, b in zip(self.tree_tokens_per_second, self.chain_tokens_per_second, strict=True)]


class Side:
    """One of the two clusters at one setting."""

    def __init__(self, cluster: LocalCluster, num_nodes: int, temperature: float, max_tokens: int) -> None:
        self.tokens_per_second: list[float] = []
        self._cluster = cluster
        self._setting = {"temperature": temperature, "num_speculative_tokens": num_nodes, "max_tokens": max_tokens}
        self._before: dict[str, float] = {}

    def run(self, prompts: list[list[int]], *, is_warm_up: bool = False) -> None:
        run = run_streams(self._cluster.url, prompts, num_streams=1, **self._setting)
        if is_warm_up:
            self._before = self._counters()
        else:
            self.tokens_per_second.append(run.tokens_per_second)

    @property
    def tokens_per_round(self) -> float:
        after = self._counters()
        return 1 + (after[ACCEPTED] - self._before[ACCEPTED]) / max(after[DRAFTS] - self._before[DRAFTS], 1.0)

    def _counters(self) -> dict[str, float]:
        return read_counters(f"{self._cluster.url}/metrics")


def main() -> None:
    arguments = _parser().parse_args()
    budgets = [int(text) for text in arguments.nodes.split(",")]
    limit = f"speculation.max_speculative_tokens={max(budgets)}"
    configs = [
        load_config(arguments.config, [*MEASURED, limit, *arguments.overrides, f"speculation.tree_width={width}"])
        for width in (1, arguments.width)
    ]
    print(f"{configs[0].target.model} drafted by {configs[0].draft.model}, one stream, {arguments.repeats} repeats\n")
    print("| nodes | T | tokens a round: chain | tree | tokens/s: chain | tree | tree / chain |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    points: list[Point] = []
    with LocalCluster(configs[0]) as chain, LocalCluster(configs[1]) as tree:
        for cluster in (chain, tree):
            cluster.wait_ready(READY_TIMEOUT_SECONDS)
        for temperature in (float(text) for text in arguments.temperatures.split(",")):
            for num_nodes in budgets:
                points.append(measure(chain, tree, num_nodes, temperature, arguments))
                print(_row(points[-1]), flush=True)
    document = {
        "target": configs[0].target.model,
        "draft": configs[0].draft.model,
        "tree_width": arguments.width,
        "machine": describe_machine(),
        "points": [asdict(point) | {"ratios": point.ratios} for point in points],
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def measure(
    chain: LocalCluster, tree: LocalCluster, num_nodes: int, temperature: float, arguments: argparse.Namespace
) -> Point:
    """Runs both in turn, as `arguments` (prompts, repeats, max_tokens) say."""
    prompts = held_out_prompts(arguments.prompts, seed=1)
    sides = [Side(cluster, num_nodes, temperature, arguments.max_tokens) for cluster in (chain, tree)]
    for side in sides:
        side.run(held_out_prompts(arguments.prompts, seed=2), is_warm_up=True)
    for _ in range(arguments.repeats):
        for side in sides:
            side.run(prompts)
    rounds, rates = [side.tokens_per_round for side in sides], [side.tokens_per_second for side in sides]
    return Point(num_nodes, temperature, rounds[0], rounds[1], rates[0], rates[1])


def _row(point: Point) -> str:
    def spread(values: list[float], digits: int = 0) -> str:
        return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"

    return (
        f"| {point.num_nodes} | {point.temperature:g} | {point.chain_tokens_per_round:.2f} "
        f"| {point.tree_tokens_per_round:.2f} | {spread(point.chain_tokens_per_second)} "
        f"| {spread(point.tree_tokens_per_second)} | {spread(point.ratios, 2)} |"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.trees", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", type=Path, help="YAML configuration of the clusters")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--nodes", default="4,8,16,32")
    parser.add_argument("--width", type=int, default=4, help="tree_width of the trees")
    parser.add_argument("--temperatures", default="0,0.7,1")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, default=Path("bench/results/trees.json"))
    return parser


if __name__ == "__main__":
    main()
