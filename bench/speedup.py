"""The whole cluster over HTTP, with speculation and without: `python -m bench.speedup`.

Two clusters run side by side, one without speculation (every core for the target, no draft) and one with; only one
of them works at a time. Repeats are interleaved, so that a drift of the machine meets both alike. Figures are
medians with their range, and the speedup is the median of the repeats' ratios: the range of six repeats covers
the true median with 97 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.machine import describe_machine
from bench.plot import plot
from bench.workload import Run, held_out_prompts, read_counters, run_streams
from cluster.config import Config, load_config
from services.launch.local import LocalCluster

READY_TIMEOUT_SECONDS = 120
WARM_UP_PROMPTS = 4
# Prompts come again in every repeat: a cache would leave their prefill out.
MEASURED = ("router.port=0", "target.enable_prefix_caching=false", "draft.enable_prefix_caching=false")


@dataclass(frozen=True, slots=True)
class Point:
    """One number of streams at one temperature."""

    num_streams: int
    temperature: float
    plain_tokens_per_second: list[float]
    tokens_per_second: list[float]
    acceptance_rate: float
    acceptance_length: float
    bytes_per_committed_token: float  # protobuf payload, both directions, opens apart
    decode_step_ms: float  # of the cluster without speculation
    verify_step_ms: float
    draft_step_ms: float
    wait_ms: float  # for proposals, a step
    round_trip_ms: float

    @property
    def speedups(self) -> list[float]:
        """One for each repeat."""
        return [a / b for a, b in zip(self.tokens_per_second, self.plain_tokens_per_second, strict=True)]

    def bound(self, k: int) -> float:
        """E * t_decode / (t_verify + k * t_draft + round trip): the speedup if nothing else took time."""
        round_ms = self.verify_step_ms + k * self.draft_step_ms + self.round_trip_ms
        return self.acceptance_length * self.decode_step_ms / round_ms


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    config = load_config(arguments.config, [*MEASURED, *arguments.overrides])
    k = config.speculation.num_speculative_tokens
    with LocalCluster(without_speculation(config)) as plain, LocalCluster(config) as speculative:
        for cluster in (plain, speculative):
            cluster.wait_ready(READY_TIMEOUT_SECONDS)
        points = []
        print(_header(config))
        for temperature in arguments.temperatures:
            for num_streams in arguments.streams:
                points.append(measure(plain, speculative, k, num_streams, temperature, arguments))
                print(_row(points[-1], k), flush=True)
    _write(arguments.out, config, arguments, points)
    plot(arguments.out)
    return 0


def without_speculation(config: Config) -> Config:
    """The same cluster with k = 0: no draft, and every core for the target."""
    return config.model_copy(
        update={"speculation": config.speculation.model_copy(update={"num_speculative_tokens": 0})}
    )


def measure(
    plain: LocalCluster,
    speculative: LocalCluster,
    k: int,
    num_streams: int,
    temperature: float,
    arguments: argparse.Namespace,
) -> Point:
    """Runs both clusters in turn, as `arguments` (prompts, repeats, max_tokens) say."""
    num_prompts = max(num_streams * 2, arguments.prompts)
    prompts = held_out_prompts(num_prompts, seed=num_streams)

    def run(cluster: LocalCluster, num_speculative_tokens: int, prompts: list[list[int]]) -> Run:
        return run_streams(
            cluster.url,
            prompts,
            num_streams=num_streams,
            temperature=temperature,
            num_speculative_tokens=num_speculative_tokens,
            max_tokens=arguments.max_tokens,
        )

    for cluster, depth in ((plain, 0), (speculative, k)):
        run(cluster, depth, prompts[:WARM_UP_PROMPTS])
    before, plain_before = _counters(speculative), _counters(plain)
    plain_rates, rates = [], []
    for _ in range(arguments.repeats):
        plain_rates.append(run(plain, 0, prompts).tokens_per_second)
        rates.append(run(speculative, k, prompts).tokens_per_second)
    after = _counters(speculative)
    grown, plain_grown = _growth(before, after), _growth(plain_before, _counters(plain))
    accepted = grown["vllm:spec_decode_num_accepted_tokens_total"]
    drafted = grown["vllm:spec_decode_num_draft_tokens_total"]
    rounds = grown["vllm:spec_decode_num_drafts_total"]
    return Point(
        num_streams=num_streams,
        temperature=temperature,
        plain_tokens_per_second=plain_rates,
        tokens_per_second=rates,
        acceptance_rate=accepted / max(drafted, 1.0),
        acceptance_length=1 + accepted / max(rounds, 1.0),
        bytes_per_committed_token=grown["outrider_link_bytes_total:round"] / grown["outrider_committed_tokens_total"],
        decode_step_ms=_mean_ms(plain_grown, "outrider_step", ":decode"),
        verify_step_ms=_mean_ms(grown, "outrider_step", ":verify"),
        draft_step_ms=_mean_ms(grown, "outrider_draft_step"),
        wait_ms=1e3 * grown["outrider_proposal_wait_seconds_total"] / grown["outrider_steps_total"],
        round_trip_ms=1e3 * after["outrider_link_round_trip_seconds"],
    )


def _counters(cluster: LocalCluster) -> dict[str, float]:
    counters = read_counters(f"{cluster.url}/metrics")
    for worker in (*cluster.targets[:1], *cluster.drafts[:1]):
        counters |= read_counters(worker.metrics_url)
    return counters


def _growth(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def _mean_ms(grown: dict[str, float], step: str, kind: str = "") -> float:
    return 1e3 * grown[f"{step}_seconds_total{kind}"] / max(grown[f"{step}s_total{kind}"], 1.0)


def _header(config: Config) -> str:
    return (
        f"{config.target.model} ({config.target.dtype}) drafted by {config.draft.model} ({config.draft.dtype}), "
        f"k = {config.speculation.num_speculative_tokens}; tokens/s are medians (range)\n\n"
        "| streams | T | no speculation | speculation | speedup | bound | acceptance | acceptance length | bytes/token "
        "| decode ms | verify ms | draft ms | wait ms | round trip ms |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    )


def _row(point: Point, k: int) -> str:
    def spread(values: list[float], digits: int = 0) -> str:
        return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"

    return (
        f"| {point.num_streams} | {point.temperature:g} | {spread(point.plain_tokens_per_second)} "
        f"| {spread(point.tokens_per_second)} | {spread(point.speedups, 2)} | {point.bound(k):.2f} "
        f"| {point.acceptance_rate:.3f} | {point.acceptance_length:.2f} | {point.bytes_per_committed_token:.1f} "
        f"| {point.decode_step_ms:.2f} | {point.verify_step_ms:.2f} | {point.draft_step_ms:.2f} "
        f"| {point.wait_ms:.2f} | {point.round_trip_ms:.2f} |"
    )


def _write(path: Path, config: Config, arguments: argparse.Namespace, points: Sequence[Point]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    k = config.speculation.num_speculative_tokens
    result = {
        "target": config.target.model_dump(mode="json"),
        "draft": config.draft.model_dump(mode="json"),
        "speculation": config.speculation.model_dump(mode="json"),
        "repeats": arguments.repeats,
        "max_tokens": arguments.max_tokens,
        "machine": describe_machine(),
        "points": [asdict(point) | {"speedups": point.speedups, "bound": point.bound(k)} for point in points],
    }
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"\nwritten to {path}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    def numbers(text: str) -> list[float]:
        return [float(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(prog="bench.speedup", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", type=Path, help="YAML configuration of the cluster")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--streams", type=lambda t: [int(n) for n in numbers(t)], default=[1, 4, 8, 16])
    parser.add_argument("--temperatures", type=numbers, default=[0.0, 1.0])
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=8, help="prompts of a repeat (at least two a stream)")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument(
        "--out", type=Path, default=Path("bench/results/speedup.json"), help="the plot goes beside it, as .svg"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
