"""Compares three places for the drafter on one host: `python -m bench.placements`.

Each of `--places` has a cluster of its own. All clusters are up, and they work in turn in every repeat, so that a drift
of the machine affects all of them equally. A ratio is the median of the repeats' ratios to the first place.

`wait / drafting` is the time that a step waits for proposals over the time of the drafter's steps, both per step of the
target.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.machine import describe_machine
from bench.speedup import AUTO, MEASURED, READY_TIMEOUT_SECONDS, WARM_UP_PROMPTS, Depth, parse_depths, spread
from bench.workload import held_out_prompts, run_streams
from cluster.config.file import load_config
from services.launch.local import LocalCluster

PLACES = {
    "pool": ("draft.placement=pool",),
    "shared": ("draft.placement=in-process", "draft.in_process_threads=shared"),
    "own": ("draft.placement=in-process", "draft.in_process_threads=own"),
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    places = PLACES | {name: tuple(settings.split()) for name, _, settings in arguments.place}
    points = []
    with contextlib.ExitStack() as stack:
        clusters = {}
        for place in [*arguments.places, *(name for name, *_ in arguments.place)]:
            config = load_config(
                arguments.config, [*MEASURED, "logging.level=warning", *arguments.overrides, *places[place]]
            )
            clusters[place] = stack.enter_context(LocalCluster(config))
        for cluster in clusters.values():
            cluster.wait_ready(READY_TIMEOUT_SECONDS)
        print(_HEADER)
        for temperature in arguments.temperatures:
            for num_streams in arguments.streams:
                for depth in arguments.depths:
                    point = measure(clusters, depth, num_streams, temperature, arguments)
                    points.append(point)
                    print(_rows(point), flush=True)
    if arguments.out is not None:
        result = {
            "settings": arguments.overrides,
            "repeats": arguments.repeats,
            "max_tokens": arguments.max_tokens,
            "machine": describe_machine(),
            "points": points,
        }
        arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def measure(
    clusters: dict[str, LocalCluster],
    depth: int | None,
    num_streams: int,
    temperature: float,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    prompts = held_out_prompts(max(num_streams, arguments.prompts), seed=num_streams)

    def run(cluster: LocalCluster, prompts: list[list[int]]) -> Any:
        return run_streams(
            cluster.url,
            prompts,
            num_streams=num_streams,
            temperature=temperature,
            num_speculative_tokens=depth,
            max_tokens=arguments.max_tokens,
        )

    measured = {place: Depth(depth) for place in clusters}
    for cluster in clusters.values():
        run(cluster, prompts[: max(WARM_UP_PROMPTS, num_streams // 2)])
    for _ in range(arguments.repeats):
        for place, cluster in clusters.items():
            measured[place].add_repeat(cluster, partial(run, cluster, prompts))
    first = next(iter(measured.values()))
    return {
        "num_streams": num_streams,
        "temperature": temperature,
        "depth": AUTO if depth is None else depth,
        "places": {place: _numbers(of_place, first) for place, of_place in measured.items()},
    }


def _numbers(measured: Depth, first: Depth) -> dict[str, Any]:
    grown = measured.grown
    num_steps = max(grown["outrider_steps_total"], 1.0)
    drafting_ms = 1e3 * grown["outrider_draft_step_seconds_total"] / num_steps
    rates = measured.tokens_per_second
    return {
        "tokens_per_second": rates,
        "ratios": [a / b for a, b in zip(rates, first.tokens_per_second, strict=True)],
        "acceptance_rate": measured.acceptance_rate,
        "mean_drafts": measured.mean_drafts,
        "verify_step_ms": measured.step_ms("outrider_step", ":verify"),
        "draft_step_ms": measured.step_ms("outrider_draft_step"),
        "drafting_ms_a_step": drafting_ms,
        "wait_ms": measured.wait_ms,
        "wait_over_drafting": measured.wait_ms / drafting_ms if drafting_ms else None,
    }


_HEADER = (
    "| streams | T | k | place | tokens/s | ratio | accepted | k verified | verify ms | draft step ms | wait ms "
    "| wait / drafting |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def _rows(point: dict[str, Any]) -> str:
    return "\n".join(
        f"| {point['num_streams']} | {point['temperature']:g} | {point['depth']} | {place} "
        f"| {spread(of_place['tokens_per_second'])} | {statistics.median(of_place['ratios']):.3f} "
        f"| {of_place['acceptance_rate']:.2f} | {of_place['mean_drafts']:.1f} | {of_place['verify_step_ms']:.2f} "
        f"| {of_place['draft_step_ms']:.2f} | {of_place['wait_ms']:.2f} | {of_place['wait_over_drafting'] or 0:.2f} |"
        for place, of_place in point["places"].items()
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.placements", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", type=Path, help="YAML configuration of the clusters")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--places", type=lambda text: text.split(","), default=list(PLACES))
    parser.add_argument(
        "--place",
        type=lambda text: text.partition("="),
        action="append",
        default=[],
        metavar="'NAME=SECTION.KEY=VALUE ...'",
        help="a further place with these settings, such as another draft",
    )
    parser.add_argument("--streams", type=lambda text: [int(n) for n in text.split(",")], default=[1, 4])
    parser.add_argument("--temperatures", type=lambda text: [float(n) for n in text.split(",")], default=[0.0, 1.0])
    parser.add_argument(
        "--depths",
        type=parse_depths,
        default=[None],
        help="auto, or a fixed k each",
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=8, help="prompts of a repeat (at least one a stream)")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main())
