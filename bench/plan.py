"""Compares the planner's prediction for this machine with a running cluster: `python -m bench.plan`.

In every repeat `outrider plan cluster --measure` times the engines' steps and predicts tokens a second. Then a cluster
without speculation and one with a fixed k answer over HTTP. Acceptance is an input of the planner. It is measured
beforehand with other prompts, as the rate at which a round of k would commit what their rounds did. The prediction has
to be within 15 % of the measurement.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.machine import describe_machine
from bench.speedup import MEASURED, READY_TIMEOUT_SECONDS, Depth, spread, without_speculation
from bench.workload import Run, held_out_prompts, run_window
from cluster.config.file import load_config
from cluster.planning.prediction import ExpectedLoad, plan
from cluster.speculation.speed import acceptance_rate_of
from services.launch.local import LocalCluster
from services.plan.measure import measured_options

BAR = 0.15
NUM_PROMPTS = 64


@dataclass(slots=True)
class Case:
    """A number of streams, without speculation or with; a figure for each repeat."""

    num_streams: int
    depth: int
    acceptance: float
    predicted: list[float] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """One for each repeat, whose two parts the machine's drift meets alike."""
        return [a / b for a, b in zip(self.predicted, self.measured, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def is_within_bar(self) -> bool:
        return abs(self.ratio - 1) <= BAR


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    config = load_config(arguments.config, [*MEASURED, *arguments.overrides])
    print("| streams | k | acceptance | tokens/s predicted (range) | measured (range) | their ratio (range) |")
    print("| --- | --- | --- | --- | --- | --- |")
    cases: list[Case] = []
    with LocalCluster(without_speculation(config)) as plain, LocalCluster(config) as speculative:
        for cluster in (plain, speculative):
            cluster.wait_ready(READY_TIMEOUT_SECONDS)
        for num_streams in arguments.streams:
            own = compare(plain, speculative, num_streams, arguments)
            cases += own
            print("\n".join(map(_row, own)), flush=True)
    print(f"\nwithin {BAR:.0%}: {sum(case.is_within_bar for case in cases)} of {len(cases)}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "machine": describe_machine(),
        "target": config.target.model,
        "draft": config.draft.model,
        "temperature": arguments.temperature,
        "cases": [asdict(case) | {"ratio": case.ratio} for case in cases],
    }
    arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def compare(
    plain: LocalCluster, speculative: LocalCluster, num_streams: int, arguments: argparse.Namespace
) -> list[Case]:
    """Both clusters at one number of streams, in turn with the planner."""
    depth, temperature = arguments.num_speculative_tokens, arguments.temperature
    acceptance = measure_acceptance(speculative, depth, num_streams, arguments)
    run(plain, 0, num_streams, arguments, seed=1)  # warms up
    cases = [Case(num_streams, 0, 0.0), Case(num_streams, depth, acceptance)]
    load = load_of(plain, num_streams, arguments)
    for _ in range(arguments.repeats):
        options = measured_options(speculative.config, load, acceptance, temperature, depth)
        for case, option, cluster in zip(cases, options, (plain, speculative), strict=True):
            case.predicted.append(plan(option, load).tokens_per_second)
            case.measured.append(run(cluster, case.depth, num_streams, arguments, seed=2).tokens_per_second)
    return cases


def run(cluster: LocalCluster, depth: int | None, num_streams: int, arguments: argparse.Namespace, seed: int) -> Run:
    """Has `cluster` answer the prompts of `seed`; `depth`: None: the controller's."""
    return run_window(
        cluster.url,
        held_out_prompts(NUM_PROMPTS, seed),
        num_streams=num_streams,
        temperature=arguments.temperature,
        num_speculative_tokens=depth,
        max_tokens=arguments.max_tokens,
        seconds=arguments.seconds,
    )


def measure_acceptance(cluster: LocalCluster, depth: int, num_streams: int, arguments: argparse.Namespace) -> float:
    """Returns the acceptance rate on prompts that are not measured otherwise."""
    counted = Depth(depth)
    counted.add_repeat(cluster, lambda: run(cluster, depth, num_streams, arguments, seed=1))
    return acceptance_rate_of(counted.acceptance_length, depth)


def load_of(cluster: LocalCluster, num_streams: int, arguments: argparse.Namespace) -> ExpectedLoad:
    """Returns the load that the prompts of seed 2 are."""
    prompt_tokens = round(statistics.mean(len(prompt) for prompt in held_out_prompts(NUM_PROMPTS, seed=2)))
    return ExpectedLoad(num_streams, prompt_tokens, arguments.max_tokens, cluster.config.target.max_num_batched_tokens)


def _row(case: Case) -> str:
    acceptance = f"{case.acceptance:.3f}" if case.depth else ""
    return (
        f"| {case.num_streams} | {case.depth} | {acceptance} | {spread(case.predicted)} | {spread(case.measured)} "
        f"| {spread(case.ratios, 2)} |"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.plan", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", type=Path, help="YAML configuration of the cluster")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--streams", type=lambda t: [int(n) for n in t.split(",")], default=[1, 4, 8])
    parser.add_argument("--num-speculative-tokens", type=int, default=4, metavar="K")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each run")
    parser.add_argument("--out", type=Path, default=Path("bench/results/plan.json"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
