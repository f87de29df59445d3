"""Measures drafting while the target verifies, with a core for each: `python -m bench.run_ahead`.

One stream. Target and draft are pinned to a core each, as on two machines. The draft waits for requests (off), goes on
along its own best drafts (chain), or along runners-up too (branches). A hit is a round whose next proposal was ready
when its outcome came. Speedups are relative to a cluster without speculation that has every core. All runs are
interleaved. The bound is that of perfect run-ahead: E * t_decode / max(t_verify, k * t_draft), with the pinned target's
own verify step and the decode step on every core.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.machine import describe_machine
from bench.speedup import MEASURED, READY_TIMEOUT_SECONDS, Depth, without_speculation
from bench.workload import Run, held_out_prompts, run_streams
from cluster.config.file import load_config
from services.launch.local import LocalCluster

PINNED = ("target.cpus=[0]", "draft.cpus=[1]", "target.threads=1", "draft.threads=1")
MODES: dict[str, tuple[str, ...]] = {
    "off": ("speculation.max_run_ahead=0",),
    "chain": ("speculation.run_ahead_branches=0",),
    "branches": ("speculation.run_ahead_branches=2",),
}
WARM_UP_PROMPTS = 4


@dataclass(frozen=True, slots=True)
class Row:
    """One mode at one temperature with one k (None: the controller's)."""

    mode: str
    temperature: float
    measured: Depth
    plain: Depth

    @property
    def speedups(self) -> list[float]:
        return [a / b for a, b in zip(self.measured.tokens_per_second, self.plain.tokens_per_second, strict=True)]

    @property
    def bound(self) -> float:
        draft_ms = self.measured.mean_drafts * self.measured.step_ms("outrider_draft_step")
        slowest_ms = max(self.measured.step_ms("outrider_step", ":verify"), draft_ms)
        return self.measured.acceptance_length * self.plain.step_ms("outrider_step", ":decode") / slowest_ms

    @property
    def hit_rate(self) -> float:
        hits, misses = (self.measured.grown[f"outrider_run_ahead_{name}_total"] for name in ("hits", "misses"))
        return hits / max(hits + misses, 1.0)

    def to_json(self) -> dict[str, Any]:
        measured = self.measured
        return {
            "mode": self.mode,
            "temperature": self.temperature,
            "k": measured.name,
            "tokens_per_second": measured.tokens_per_second,
            "speedups": self.speedups,
            "bound": self.bound,
            "hit_rate": self.hit_rate,
            "hits_and_misses": {
                name.removeprefix("outrider_run_ahead_"): count
                for name, count in measured.grown.items()
                if name.startswith("outrider_run_ahead_") and count
            },
            "acceptance_length": measured.acceptance_length,
            "mean_drafts": measured.mean_drafts,
            "verify_step_ms": measured.step_ms("outrider_step", ":verify"),
            "decode_step_ms_on_every_core": self.plain.step_ms("outrider_step", ":decode"),
            "draft_step_ms": measured.step_ms("outrider_draft_step"),
            "wait_ms": measured.wait_ms,
        }

    def __str__(self) -> str:
        measured, speedups = self.measured, self.speedups
        return (
            f"| {self.temperature:g} | {measured.name} | {self.mode} | {self.hit_rate:.0%} "
            f"| {statistics.median(measured.tokens_per_second):.0f} "
            f"| {statistics.median(speedups):.2f} ({min(speedups):.2f}-{max(speedups):.2f}) | {self.bound:.2f} "
            f"| {measured.mean_drafts:.1f} | {measured.acceptance_length:.2f} | {measured.wait_ms:.2f} "
            f"| {measured.step_ms('outrider_step', ':verify'):.1f} | {measured.step_ms('outrider_draft_step'):.2f} |"
        )


def main() -> None:
    arguments = _parser().parse_args()
    plain_config = without_speculation(load_config(None, [*MEASURED, *arguments.overrides]))
    configs = {mode: load_config(None, [*MEASURED, *PINNED, *arguments.overrides, *own]) for mode, own in MODES.items()}
    print(
        f"{plain_config.target.model} drafted by {plain_config.draft.model}, one stream, "
        f"{arguments.repeats} repeats\n\n"
        "| T | k | run-ahead | hits | tokens/s | speedup (range) | bound | k verified | acceptance length | wait ms "
        "| verify ms | draft ms |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    )
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(LocalCluster(plain_config))
        pinned = {mode: stack.enter_context(LocalCluster(config)) for mode, config in configs.items()}
        for cluster in (plain, *pinned.values()):
            cluster.wait_ready(READY_TIMEOUT_SECONDS)
        for temperature in arguments.temperatures:
            new_rows = measure(plain, pinned, temperature, arguments)
            rows += new_rows
            print(*new_rows, sep="\n", flush=True)
    document = {
        "target": plain_config.target.model,
        "draft": plain_config.draft.model,
        "repeats": arguments.repeats,
        "machine": describe_machine(),
        "rows": [row.to_json() for row in rows],
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def measure(
    plain: LocalCluster, pinned: dict[str, LocalCluster], temperature: float, arguments: argparse.Namespace
) -> list[Row]:
    """Runs all in turn, as `arguments` (k, prompts, repeats, max_tokens) say."""
    prompts = held_out_prompts(arguments.prompts, seed=1)

    def run(cluster: LocalCluster, depth: int | None, prompts: Sequence[Sequence[int]]) -> Run:
        return run_streams(
            cluster.url,
            prompts,
            num_streams=1,
            temperature=temperature,
            num_speculative_tokens=depth,
            max_tokens=arguments.max_tokens,
        )

    baseline = Depth(0)
    rows = [Row(mode, temperature, Depth(depth), baseline) for depth in (arguments.k, None) for mode in pinned]
    settings = [(plain, baseline), *((pinned[row.mode], row.measured) for row in rows)]
    for cluster, measured in settings:
        run(cluster, measured.depth, held_out_prompts(WARM_UP_PROMPTS, seed=2))
    for _ in range(arguments.repeats):
        for cluster, measured in settings:
            measured.add_repeat(cluster, partial(run, cluster, measured.depth, prompts))
    return rows


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.run_ahead", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("-k", type=int, default=4)
    parser.add_argument(
        "--temperatures", type=lambda text: [float(part) for part in text.split(",")], default=[0.0, 0.7, 1.0]
    )
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, default=Path("bench/results/run_ahead.json"))
    return parser


if __name__ == "__main__":
    main()
