"""Chains, trees and the classical acceptances with as many nodes: `python -m bench.trees`.

One stream. Four clusters run side by side: coupled acceptance with `tree_width` 1 (chain) and more (tree), `rejection`
and `greedy`, which verify chains. Only one of them works at a time, and all settings are interleaved. The number of
nodes is what the request asks for; the tree's shape, and with "auto" the number too, is the cluster's own choice from
what it measures while it warms up and on. The bar is on that choice: at least 0.98 of the best chain.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.result import describe_machine, write_result
from bench.speedup import AUTO, MEASURED, READY_TIMEOUT_SECONDS, Depth, over_best, spread
from bench.workload import Run, held_out_prompts, run_streams
from cluster.config import Config
from cluster.config.file import load_config
from services.launch.local import LocalCluster

FLOOR = 0.98  # of the best chain
CHAIN, TREE = "chain", "tree"
KINDS = (CHAIN, TREE, "rejection", "greedy")
WARM_UP_PROMPTS = 4


@dataclass(frozen=True, slots=True)
class Setting:
    """One of `KINDS` with one number of nodes (None: the controller's)."""

    kind: str
    measured: Depth

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "nodes": self.measured.name,
            "tokens_per_second": self.measured.tokens_per_second,
            "tokens_per_round": self.measured.acceptance_length,
            "mean_nodes": self.measured.mean_drafts,
            "verify_step_ms": self.measured.step_ms("outrider_step", ":verify"),
            "wait_ms": self.measured.wait_ms,
        }


@dataclass(frozen=True, slots=True)
class Point:
    """All settings at one temperature."""

    temperature: float
    settings: list[Setting]

    def measured(self, kind: str, nodes: int | None) -> Depth:
        return next(s.measured for s in self.settings if s.kind == kind and s.measured.depth == nodes)

    @property
    def chains(self) -> list[Depth]:
        return [s.measured for s in self.settings if s.kind == CHAIN and s.measured.depth is not None]

    def auto_over_best_chain(self, kind: str) -> float | None:
        return over_best(self.measured(kind, None), self.chains)

    def to_json(self) -> dict[str, Any]:
        return {
            "temperature": self.temperature,
            "settings": [setting.to_json() for setting in self.settings],
            "auto_over_best_chain": {kind: self.auto_over_best_chain(kind) for kind in (CHAIN, TREE)},
        }

    def __str__(self) -> str:
        rows = []
        for setting in self.settings:
            own, chain = setting.measured, self.measured(CHAIN, setting.measured.depth)
            ratios = [a / b for a, b in zip(own.tokens_per_second, chain.tokens_per_second, strict=True)]
            rows.append(
                f"| {self.temperature:g} | {own.name} | {setting.kind} | {own.mean_drafts:.1f} "
                f"| {own.acceptance_length:.2f} | {spread(own.tokens_per_second)} | {spread(ratios, 2)} "
                f"| {own.step_ms('outrider_step', ':verify'):.1f} | {own.wait_ms:.1f} |"
            )
        for kind in (CHAIN, TREE):
            ratio = self.auto_over_best_chain(kind)
            if ratio is not None:
                rows.append(f"| {self.temperature:g} | {AUTO} | {kind} over the best chain | | | | {ratio:.2f} | | |")
        return "\n".join(rows)


def main() -> None:
    arguments = _parser().parse_args()
    configs = {kind: _config(kind, arguments) for kind in KINDS}
    own = configs[CHAIN]
    print(f"{own.target.model} drafted by {own.draft.model}, one stream, {arguments.repeats} repeats\n")
    print("| T | nodes | kind | nodes verified | tokens a round | tokens/s | over the chain | verify ms | wait ms |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    points: list[Point] = []
    with contextlib.ExitStack() as stack:
        clusters = {kind: stack.enter_context(LocalCluster(config)) for kind, config in configs.items()}
        for cluster in clusters.values():
            cluster.wait_ready(READY_TIMEOUT_SECONDS)
        for temperature in arguments.temperatures:
            points.append(measure(clusters, temperature, arguments))
            print(points[-1], flush=True)
            _write(arguments, own, points)


def _config(kind: str, arguments: argparse.Namespace) -> Config:
    own = (
        f"speculation.max_speculative_tokens={max(arguments.nodes)}",
        f"speculation.tree_width={arguments.width if kind == TREE else 1}",
        f"speculation.acceptance={kind if kind not in (CHAIN, TREE) else 'coupled'}",
    )
    return load_config(None, [*MEASURED, *arguments.overrides, *own])


def measure(clusters: dict[str, LocalCluster], temperature: float, arguments: argparse.Namespace) -> Point:
    """Runs all settings in turn, as `arguments` (nodes, prompts, repeats, max_tokens) say."""
    prompts = held_out_prompts(arguments.prompts, seed=1)

    def run(kind: str, nodes: int | None, prompts: Sequence[Sequence[int]]) -> Run:
        return run_streams(
            clusters[kind].url,
            prompts,
            num_streams=1,
            temperature=temperature,
            num_speculative_tokens=nodes,
            max_tokens=arguments.max_tokens,
        )

    settings = [Setting(kind, Depth(nodes)) for nodes in arguments.nodes for kind in KINDS]
    settings += [Setting(kind, Depth(None)) for kind in (CHAIN, TREE)]
    for setting in settings:
        run(setting.kind, setting.measured.depth, held_out_prompts(WARM_UP_PROMPTS, seed=2))
    for _ in range(arguments.repeats):
        for setting in settings:
            measured = setting.measured
            measured.add_repeat(clusters[setting.kind], partial(run, setting.kind, measured.depth, prompts))
    return Point(temperature, settings)


def _write(arguments: argparse.Namespace, config: Config, points: Sequence[Point]) -> None:
    document = {
        "floor": FLOOR,
        "target": config.target.model,
        "draft": config.draft.model,
        "tree_width": arguments.width,
        "repeats": arguments.repeats,
        "machine": describe_machine(),
        "points": [point.to_json() for point in points],
    }
    write_result(arguments.out, document)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.trees", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--nodes", type=lambda text: [int(part) for part in text.split(",")], default=[4, 8, 16, 32])
    parser.add_argument("--width", type=int, default=4, help="tree_width of the trees")
    parser.add_argument(
        "--temperatures", type=lambda text: [float(part) for part in text.split(",")], default=[0.0, 0.7, 1.0]
    )
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("bench/results/trees.json"))
    return parser


if __name__ == "__main__":
    main()
