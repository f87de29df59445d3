"""Measures the speedup of a whole cluster over HTTP: `python -m bench.speedup`.

Two clusters are up, one without speculation (every core for the target, no draft) and one with it. Only one of them
works at a time. The second runs every depth in turn: the k that its controller chooses (auto), and each fixed k of
`--depths`, which a request can ask for. All of it is repeated, so that a drift of the machine affects all equally.

A speedup is the median of the repeats' ratios to no speculation. The best fixed k is picked on every other repeat and
judged on those between.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.result import describe_machine, write_result
from bench.workload import PROMPT_TOKENS, Run, held_out_prompts, read_counters, run_streams, run_window
from cluster.config import Config
from cluster.config.file import load_config
from services.launch.local import LocalCluster

READY_TIMEOUT_SECONDS = 120
WARM_UP_PROMPTS = 4
# Prompts come again in every repeat: a cache would leave their prefill out.
MEASURED = ("router.port=0", "target.enable_prefix_caching=false", "draft.enable_prefix_caching=false")
AUTO = "auto"


@dataclass(slots=True)
class Depth:
    """Results of one depth at one point: a rate for each repeat, and the counters' growth over all repeats."""

    depth: int | None  # None: the controller's
    tokens_per_second: list[float] = field(default_factory=list)
    grown: Counter[str] = field(default_factory=Counter)
    round_trip_ms: float = 0.0

    def add_repeat(self, cluster: LocalCluster, run: Callable[[], Run]) -> None:
        """Calls `run`, and records its rate and the growth of the cluster's counters meanwhile."""
        before = cluster_counters(cluster)
        self.tokens_per_second.append(run().tokens_per_second)
        after = cluster_counters(cluster)
        self.round_trip_ms = 1e3 * after.get("outrider_link_round_trip_seconds", 0.0)
        self.grown.update({name: value - before.get(name, 0.0) for name, value in after.items()})

    @property
    def name(self) -> str:
        return AUTO if self.depth is None else str(self.depth)

    @property
    def num_rounds(self) -> float:
        return self.grown["vllm:spec_decode_num_drafts_total"]

    @property
    def acceptance_rate(self) -> float:
        accepted = self.grown["vllm:spec_decode_num_accepted_tokens_total"]
        return accepted / max(self.grown["vllm:spec_decode_num_draft_tokens_total"], 1.0)

    @property
    def mean_drafts(self) -> float:
        """Draft tokens verified in a round."""
        return self.grown["vllm:spec_decode_num_draft_tokens_total"] / max(self.num_rounds, 1.0)

    @property
    def acceptance_length(self) -> float:
        return 1 + self.grown["vllm:spec_decode_num_accepted_tokens_total"] / max(self.num_rounds, 1.0)

    @property
    def acceptance_by_position(self) -> list[float]:
        """For each position of a proposal, the share of rounds in which its draft was accepted."""
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        numbers = [self.grown[f"{name}:{position}"] for position in range(self.depth or 0)]
        return [number / max(self.num_rounds, 1.0) for number in numbers]

    @property
    def bytes_per_token(self) -> float:
        """Protobuf payload of the links, both directions, opens apart, for a committed token."""
        return self.grown["outrider_link_bytes_total:round"] / max(self.grown["outrider_committed_tokens_total"], 1.0)

    def step_ms(self, step: str, kind: str = "") -> float:
        return 1e3 * self.grown[f"{step}_seconds_total{kind}"] / max(self.grown[f"{step}s_total{kind}"], 1.0)

    @property
    def wait_ms(self) -> float:
        """Milliseconds that a step waits for proposals, on average."""
        return 1e3 * self.grown["outrider_proposal_wait_seconds_total"] / max(self.grown["outrider_steps_total"], 1.0)


@dataclass(frozen=True, slots=True)
class Point:
    """One number of streams at one temperature."""

    num_streams: int
    temperature: float
    plain: Depth
    depths: list[Depth]

    def speedups(self, depth: Depth) -> list[float]:
        """One for each repeat."""
        return [a / b for a, b in zip(depth.tokens_per_second, self.plain.tokens_per_second, strict=True)]

    def bound(self, depth: Depth) -> float:
        """E * t_decode / (t_verify + k * t_draft + round trip): the speedup if nothing else took time."""
        round_ms = (
            depth.step_ms("outrider_step", ":verify")
            + depth.mean_drafts * depth.step_ms("outrider_draft_step")
            + depth.round_trip_ms
        )
        decode_ms = self.plain.step_ms("outrider_step", ":decode")
        return depth.acceptance_length * decode_ms / round_ms if depth.num_rounds else 1.0

    def auto_over_best_fixed(self) -> float | None:
        """The controller's rate over that of the best fixed k; None with fewer than two repeats."""
        auto = next((depth for depth in self.depths if depth.depth is None), None)
        return None if auto is None else over_best(auto, [depth for depth in self.depths if depth.depth is not None])

    def to_json(self) -> dict[str, Any]:
        return {
            "num_streams": self.num_streams,
            "temperature": self.temperature,
            "plain_tokens_per_second": self.plain.tokens_per_second,
            "decode_step_ms": self.plain.step_ms("outrider_step", ":decode"),
            "auto_over_best_fixed": self.auto_over_best_fixed(),
            "depths": {
                depth.name: {
                    "tokens_per_second": depth.tokens_per_second,
                    "speedups": self.speedups(depth),
                    "bound": self.bound(depth),
                    "acceptance_rate": depth.acceptance_rate,
                    "acceptance_by_position": depth.acceptance_by_position,
                    "acceptance_length": depth.acceptance_length,
                    "mean_drafts": depth.mean_drafts,
                    "bytes_per_committed_token": depth.bytes_per_token,
                    "verify_step_ms": depth.step_ms("outrider_step", ":verify"),
                    "draft_step_ms": depth.step_ms("outrider_draft_step"),
                    "wait_ms": depth.wait_ms,
                    "round_trip_ms": depth.round_trip_ms,
                }
                for depth in self.depths
            },
        }


def parse_depths(text: str) -> list[int | None]:
    """`auto,0,3`; None: the controller's."""
    return [None if part == AUTO else int(part) for part in text.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    config = load_config(arguments.config, [*MEASURED, *arguments.overrides])
    with LocalCluster(without_speculation(config)) as plain, LocalCluster(config) as speculative:
        for cluster in (plain, speculative):
            cluster.wait_ready(READY_TIMEOUT_SECONDS)
        points = []
        print(_header(config))
        for temperature in arguments.temperatures:
            for num_streams in arguments.streams:
                depths, model = arguments.depths, config.target.model
                points.append(measure(plain, speculative, depths, num_streams, temperature, arguments, model=model))
                print(_rows(points[-1]), flush=True)
                _write(arguments.out, config, arguments, points)
    return 0


def over_best(own: Depth, others: Sequence[Depth]) -> float | None:
    """The rate of `own` over that of the best of `others`, which is picked on every other repeat and judged on those
    between; None with fewer than two repeats."""
    if not others or len(own.tokens_per_second) < 2:
        return None
    best = max(others, key=lambda depth: statistics.median(depth.tokens_per_second[::2]))
    pairs = zip(own.tokens_per_second[1::2], best.tokens_per_second[1::2], strict=True)
    return statistics.median(a / b for a, b in pairs)


def without_speculation(config: Config) -> Config:
    """Returns the configuration of the same cluster with k = 0: no draft, and every core for the target."""
    return config.model_copy(
        update={"speculation": config.speculation.model_copy(update={"num_speculative_tokens": 0})}
    )


def measure(
    plain: LocalCluster,
    speculative: LocalCluster,
    depths: Sequence[int | None],
    num_streams: int,
    temperature: float,
    arguments: argparse.Namespace,
    *,
    model: str | None = None,
) -> Point:
    """Runs both clusters in turn, as `arguments` (prompts, repeats, max_tokens, seconds) say.

    `model`: whose tokens the prompts are; None: the bundled target's.
    """
    num_prompts = max(num_streams, arguments.prompts)
    length = arguments.prompt_tokens
    prompts = held_out_prompts(
        num_prompts, seed=num_streams, model=model, num_tokens=(length, length) if length else PROMPT_TOKENS
    )

    def run(cluster: LocalCluster, depth: int | None, prompts: list[list[int]], seconds: float | None = None) -> Run:
        run = run_streams if seconds is None else partial(run_window, seconds=seconds)
        return run(
            cluster.url,
            prompts,
            num_streams=num_streams,
            temperature=temperature,
            num_speculative_tokens=depth,
            max_tokens=arguments.max_tokens,
        )

    point = Point(num_streams, temperature, Depth(0), [Depth(depth) for depth in depths])
    run(plain, 0, prompts[:WARM_UP_PROMPTS])
    for depth in depths:
        run(speculative, depth, prompts[: max(WARM_UP_PROMPTS, num_streams // 2)])
    for _ in range(arguments.repeats):
        for cluster, measured in ((plain, point.plain), *((speculative, depth) for depth in point.depths)):
            measured.add_repeat(cluster, partial(run, cluster, measured.depth, prompts, arguments.seconds))
    return point


def cluster_counters(cluster: LocalCluster) -> dict[str, float]:
    counters = read_counters(f"{cluster.url}/metrics")
    for worker in (*cluster.targets[:1], *cluster.drafts[:1]):
        counters |= read_counters(worker.metrics_url)
    return counters


def _header(config: Config) -> str:
    return (
        f"{config.target.model} ({config.target.dtype}) drafted by {config.draft.model} ({config.draft.dtype}); "
        "medians (range)\n\n"
        "| streams | T | k | tokens/s | speedup | bound | acceptance | acceptance length | k verified | bytes/token "
        "| verify ms | draft ms | wait ms |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    )


def spread(values: Sequence[float], digits: int = 0) -> str:
    """The median with its range."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def _rows(point: Point) -> str:
    start = f"| {point.num_streams} | {point.temperature:g} "
    decode_ms = point.plain.step_ms("outrider_step", ":decode")
    rows = [f"{start}| none | {spread(point.plain.tokens_per_second)} | 1 | | | | | | {decode_ms:.2f} (decode) | | |"]
    for depth in point.depths:
        rows.append(
            f"{start}| {depth.name} | {spread(depth.tokens_per_second)} | {spread(point.speedups(depth), 2)} "
            f"| {point.bound(depth):.2f} | {depth.acceptance_rate:.3f} | {depth.acceptance_length:.2f} "
            f"| {depth.mean_drafts:.1f} | {depth.bytes_per_token:.1f} "
            f"| {depth.step_ms('outrider_step', ':verify'):.2f} | {depth.step_ms('outrider_draft_step'):.2f} "
            f"| {depth.wait_ms:.2f} |"
        )
    ratio = point.auto_over_best_fixed()
    if ratio is not None:
        rows.append(f"{start}| auto over best fixed | {ratio:.2f} | | | | | | | | | |")
    return "\n".join(rows)


def _write(path: Path, config: Config, arguments: argparse.Namespace, points: Sequence[Point]) -> None:
    result = {
        "target": config.target.model_dump(mode="json"),
        "draft": config.draft.model_dump(mode="json"),
        "speculation": config.speculation.model_dump(mode="json"),
        "repeats": arguments.repeats,
        "max_tokens": arguments.max_tokens,
        "prompt_tokens": arguments.prompt_tokens,
        "seconds": arguments.seconds,
        "machine": describe_machine(),
        "points": [point.to_json() for point in points],
    }
    write_result(path, result)


def _parser() -> argparse.ArgumentParser:
    def numbers(text: str) -> list[float]:
        return [float(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(prog="bench.speedup", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", type=Path, help="YAML configuration of the cluster")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--streams", type=lambda t: [int(n) for n in numbers(t)], default=[1, 4, 16, 64])
    parser.add_argument("--temperatures", type=numbers, default=[0.0, 1.0])
    parser.add_argument(
        "--depths", type=parse_depths, default=[None, 0, 1, 2, 3, 5, 7, 10], help="auto, or a fixed k each"
    )
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=8, help="prompts of a repeat (at least one a stream)")
    parser.add_argument("--prompt-tokens", type=int, help="tokens of each prompt; default: 32 to 160")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument(
        "--seconds",
        type=float,
        help="count what comes in so many seconds while every stream is busy; else all prompts are answered once",
    )
    parser.add_argument("--out", type=Path, default=Path("bench/results/speedup.json"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
