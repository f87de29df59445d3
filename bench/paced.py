"""Compares engines with simulated engines that are paced by them: `python -m bench.paced`.

Virtual time (`bench.pool`, `outrider simulate`) has step times in place of forward passes. Here a cluster answers the
same prompts with its engines, and then with simulated engines that are paced by them: their steps take what steps of
the engines took on the same cores, and they accept as many drafts. All else is the same programs. Target and draft have
a core each, as in a pool; client and router share them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.in_process import SIMULATED
from bench.machine import describe_machine
from bench.plan import load_of, measure_acceptance, run
from bench.speedup import AUTO, MEASURED, READY_TIMEOUT_SECONDS, parse_depths, spread
from cluster.config.file import load_config
from cluster.planning.steps import MeasuredSteps
from services.launch.local import LocalCluster
from services.plan.measure import measure_draft, measure_target

BAR = 0.05
_KNOWN_DEPTH = 4  # that acceptance is measured with
_CORES = ("target.cpus=[0]", "draft.cpus=[1]")


@dataclass(slots=True)
class Case:
    num_streams: int
    depth: int | None  # None: the controller's
    real: list[float] = field(default_factory=list)  # tokens per second, of each repeat
    paced: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        return [paced / real for paced, real in zip(self.paced, self.real, strict=True)]

    @property
    def is_within_bar(self) -> bool:
        return abs(statistics.median(self.ratios) - 1) <= BAR


@dataclass(frozen=True, slots=True)
class Pace:
    """Step times and acceptance rate of the engines at one number of streams."""

    target: MeasuredSteps
    draft: MeasuredSteps
    acceptance: float

    @property
    def settings(self) -> list[str]:
        def curve(steps: MeasuredSteps) -> list[list[float]]:
            return [[rows, 1e3 * seconds] for rows, seconds in steps.points]

        return [
            *SIMULATED,
            f"simulation.target_step_ms={curve(self.target)}",
            f"simulation.draft_step_ms={curve(self.draft)}",
            f"simulation.acceptance={self.acceptance}",
        ]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    given = [*MEASURED, *_CORES, "logging.level=warning", *arguments.overrides]
    config = load_config(arguments.config, given)
    print("| streams | k | acceptance | tokens/s of the engines (range) | paced (range) | paced over real (range) |")
    print("| --- | --- | --- | --- | --- | --- |")
    cases: list[Case] = []
    with LocalCluster(config) as real:
        real.wait_ready(READY_TIMEOUT_SECONDS)
        for num_streams in arguments.streams:
            pace = measure_pace(real, num_streams, arguments)
            with LocalCluster(load_config(arguments.config, [*given, *pace.settings])) as paced:
                paced.wait_ready(READY_TIMEOUT_SECONDS)
                for case in compare(real, paced, num_streams, arguments):
                    cases.append(case)
                    print(_row(case, pace.acceptance), flush=True)
    print(f"\nwithin {BAR:.0%}: {sum(case.is_within_bar for case in cases)} of {len(cases)}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "machine": describe_machine(),
        "target": config.target.model,
        "draft": config.draft.model,
        "temperature": arguments.temperature,
        "cases": [asdict(case) | {"ratio": statistics.median(case.ratios)} for case in cases],
    }
    arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def measure_pace(real: LocalCluster, num_streams: int, arguments: argparse.Namespace) -> Pace:
    acceptance = measure_acceptance(real, _KNOWN_DEPTH, num_streams, arguments)
    load = load_of(real, num_streams, arguments)
    (target,), (draft,) = (
        measure(real.config, [load], arguments.temperature) for measure in (measure_target, measure_draft)
    )
    return Pace(target, draft, acceptance)


def compare(real: LocalCluster, paced: LocalCluster, num_streams: int, arguments: argparse.Namespace) -> list[Case]:
    """Runs both clusters with each depth, in turn."""
    cases = [Case(num_streams, depth) for depth in arguments.depths]
    for case in cases:
        for cluster in (real, paced):
            run(cluster, case.depth, num_streams, arguments, seed=1)  # warms up
    for _ in range(arguments.repeats):
        for case in cases:
            for cluster, speeds in ((real, case.real), (paced, case.paced)):
                speeds.append(run(cluster, case.depth, num_streams, arguments, seed=2).tokens_per_second)
    return cases


def _row(case: Case, acceptance: float) -> str:
    depth = AUTO if case.depth is None else str(case.depth)
    return (
        f"| {case.num_streams} | {depth} | {acceptance:.3f} | {spread(case.real)} | {spread(case.paced)} "
        f"| {spread(case.ratios, 2)} |"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.paced", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", type=Path, help="YAML configuration of the cluster")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--streams", type=lambda t: [int(n) for n in t.split(",")], default=[1, 4, 8])
    parser.add_argument("--depths", type=parse_depths, default=[None, 0, 4], help=f"{AUTO}, or a fixed k")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each run")
    parser.add_argument("--out", type=Path, default=Path("bench/results/paced.json"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
