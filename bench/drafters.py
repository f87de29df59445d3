"""Measures drafters on one target: `python -m bench.drafters`.

Prints the cost of a draft step, the acceptance, and the k with the largest speedup over a cluster without speculation.
The measurements of both clusters and of every k are interleaved as in `bench.speedup`. A drafter is one of the names
below, or `draft.drafter` and `draft.model`, such as `eagle=FOLDER`. With `--acceptances greedy` a drafter proposes its
likeliest tokens, without the noise of the target.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.result import describe_machine, write_result
from bench.speedup import MEASURED, READY_TIMEOUT_SECONDS, Depth, Point, measure, spread, without_speculation
from cluster.config import Config
from cluster.config.file import load_config
from cluster.engine.medusa import MedusaHeads
from cluster.engine.runner import load_weights
from cluster.errors import ConfigurationError
from cluster.factories.drafters import is_model, load_draft_weights, load_heads
from services.launch.local import LocalCluster

DRAFTERS: dict[str, tuple[str, ...]] = {
    "model": (),
    "model, int8": ("draft.quantization=int8",),
    "model, int4 g32": ("draft.quantization=int4", "draft.quantization_group_size=32"),
    "model, int4 g128": ("draft.quantization=int4", "draft.quantization_group_size=128"),
    "self-int4 g32": ("draft.drafter=self-int4", "draft.quantization_group_size=32"),
    "self-int4 g128": ("draft.drafter=self-int4", "draft.quantization_group_size=128"),
    "ngram": ("draft.drafter=ngram",),
    "eagle": ("draft.drafter=eagle", "draft.model=outrider-eagle-12m"),
}
_COMPARED_DEPTH = 3  # the k at which acceptance and times of all drafters are reported


@dataclass(frozen=True, slots=True)
class Measured:
    """The results of one drafter, acceptance, temperature and number of streams."""

    drafter: str
    acceptance: str  # as in `speculation.acceptance`
    gigabytes: float  # of weights that a draft step reads
    point: Point

    @property
    def compared(self) -> Depth:
        return next(depth for depth in self.point.depths if depth.depth == _COMPARED_DEPTH)

    @property
    def best(self) -> Depth:
        """The fixed k with the highest median speed, including 0 (no speculation)."""
        fixed = [self.point.plain, *(depth for depth in self.point.depths if depth.depth is not None)]
        return max(fixed, key=lambda depth: statistics.median(depth.tokens_per_second))

    def row(self) -> str:
        compared, best, point = self.compared, self.best, self.point
        auto = next(depth for depth in point.depths if depth.depth is None)
        return (
            f"| {self.drafter} | {self.acceptance} | {point.temperature:g} | {point.num_streams} "
            f"| {self.gigabytes:.3f} | {compared.step_ms('outrider_draft_step'):.2f} | {compared.acceptance_rate:.3f} "
            f"| {' '.join(f'{share:.2f}' for share in compared.acceptance_by_position)} "
            f"| {compared.acceptance_length:.2f} | {best.name}: {spread(point.speedups(best), 2)} "
            f"| {spread(point.speedups(auto), 2)} | {auto.mean_drafts:.1f} "
            f"| {point.plain.step_ms('outrider_step', ':decode'):.2f} |"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "drafter": self.drafter,
            "acceptance": self.acceptance,
            "gigabytes": self.gigabytes,
            "best_k": self.best.name,
            **self.point.to_json(),
        }


_HEADER = (
    f"| drafter | acceptance | T | streams | GB | draft ms | accepted / drafted, k = {_COMPARED_DEPTH} | by position "
    "| acceptance length | best k: speedup | auto: speedup | k of auto | decode ms |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _parser().parse_args(argv)
    base = load_config(None, [*MEASURED, *arguments.overrides])
    print(f"{base.target.model}, {arguments.repeats} repeats\n\n{_HEADER}")
    results: list[Measured] = []
    depths = [None, *arguments.depths]
    with LocalCluster(without_speculation(base)) as plain:
        plain.wait_ready(READY_TIMEOUT_SECONDS)
        for name, acceptance in itertools.product(arguments.drafters, arguments.acceptances):
            settings = (*_settings(name), f"speculation.acceptance={acceptance}")
            config = load_config(None, [*MEASURED, *arguments.overrides, *settings])
            try:
                gigabytes = _gigabytes(config)
            except ConfigurationError as error:  # rows that don't divide into groups of 128
                print(f"| {name} | | none: {error} |", flush=True)
                continue
            with LocalCluster(config) as speculative:
                speculative.wait_ready(READY_TIMEOUT_SECONDS)
                for temperature, streams in itertools.product(arguments.temperatures, arguments.streams):
                    point = measure(
                        plain, speculative, depths, streams, temperature, arguments, model=base.target.model
                    )
                    results.append(Measured(name, acceptance, gigabytes, point))
                    print(results[-1].row(), flush=True)
    document = {
        "target": base.target.model,
        "machine": describe_machine(),
        "repeats": arguments.repeats,
        "max_tokens": arguments.max_tokens,
        "points": [measured.to_json() for measured in results],
    }
    write_result(arguments.out, document)


def _settings(name: str) -> tuple[str, ...]:
    """Returns the settings of a drafter. `name`: a key of `DRAFTERS`, or DRAFTER=MODEL."""
    drafter, _, model = name.partition("=")
    return (f"draft.drafter={drafter}", f"draft.model={model}") if model else DRAFTERS[name]


def _drafter_name(text: str) -> str:
    drafter, _, model = text.partition("=")
    if text not in DRAFTERS and not (model and drafter in ("model", "parallel", "eagle", "medusa")):
        raise argparse.ArgumentTypeError(f"{text!r} is neither DRAFTER=MODEL nor one of {', '.join(DRAFTERS)}")
    return text


def _gigabytes(config: Config) -> float:
    if config.draft.reads_states:
        heads = load_heads(config, load_weights(config.target))
        return (heads if isinstance(heads, MedusaHeads) else heads.model.weights).num_bytes_read / 1e9
    if not is_model(config.draft.drafter):
        return 0.0
    return load_draft_weights(config).weights.num_bytes_read / 1e9


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.drafters", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--drafters", nargs="+", type=_drafter_name, default=list(DRAFTERS), metavar="NAME")
    parser.add_argument("--acceptances", nargs="+", choices=("coupled", "greedy"), default=["coupled"])
    parser.add_argument("--streams", type=lambda text: [int(n) for n in text.split(",")], default=[1])
    parser.add_argument("--temperatures", type=lambda text: [float(t) for t in text.split(",")], default=[0.0, 1.0])
    parser.add_argument("--depths", type=lambda text: [int(k) for k in text.split(",")], default=[1, 3, 5, 7])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("bench/results/drafters.json"))
    parser.set_defaults(seconds=None, prompt_tokens=None)
    return parser


if __name__ == "__main__":
    main()
