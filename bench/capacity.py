"""Measures how many clients a target serves within latency limits, for each way to draft: `python -m bench.capacity`.

A 70B target on 4 A100 and a 1B draft run in virtual time (`bench.placed`): without speculation, with the draft on the
target's GPUs, with a pool of A10G, with a head, and with n-grams. The controller chooses k. Steps take the times that
the planner predicts, and the planner's own capacity is printed next to each figure. `--set` takes further settings.

The most clients within the limits are interpolated between the numbers that were run. A run with more clients is left
out when one with fewer exceeds all limits. *over the target's GPUs* is the number of clients of a pool over that of the
same draft on the target's GPUs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.placed import Placed, SimulatedPoint, within
from bench.result import write_cells
from cluster.engine.memory_plan import PlannedModel
from cluster.planning.hardware import parse_gpus
from cluster.planning.latency import LatencyLimits
from cluster.planning.options import BESIDE, ClusterRequest, main_options
from cluster.planning.prediction import ExpectedLoad, Option, most_sequences

_ONE_PASS = ", one pass"


@dataclass(frozen=True, slots=True)
class Cell:
    prompt_tokens: int
    option: str
    first_token_ms: float
    between_tokens_ms: float
    clients: float
    is_at_least: bool  # all numbers that were run are within the limits
    planned: int
    over_targets_gpus: float | None  # of a pool: the clients over those of the same draft on the target's GPUs
    fewest_answers: int  # of a point


def run(option: Option, load: ExpectedLoad, arguments: argparse.Namespace) -> list[SimulatedPoint]:
    """Returns the points in ascending order of clients, up to the first that exceeds all limits."""
    points: list[SimulatedPoint] = []
    for num_clients in arguments.clients:
        placed = Placed(option, replace(load, num_seqs=num_clients), more=tuple(arguments.overrides))
        points.append(placed.run(arguments.answers))
        if all(points[-1].excess(limits) > 1 for limits in arguments.limits):
            break
    return points


def cells(
    option: Option, load: ExpectedLoad, points: Sequence[SimulatedPoint], arguments: argparse.Namespace
) -> list[Cell]:
    found = []
    for limits in arguments.limits:
        most = within(points, limits)
        planned = most_sequences(option, load, limits, max(arguments.clients))
        found.append(
            Cell(
                load.prompt_tokens,
                option.name,
                1e3 * limits.first_token,
                1e3 * limits.between_tokens,
                most.num_clients,
                most.is_at_least,
                planned,
                None,
                min(point.num_answers for point in points),
            )
        )
    return found


def compared(found: Sequence[Cell]) -> list[Cell]:
    """Returns the cells, those of pools with their ratio to the same draft on the target's GPUs."""
    beside = {_key(cell): cell.clients for cell in found if cell.option.startswith(BESIDE)}
    return [
        replace(cell, over_targets_gpus=cell.clients / beside[_key(cell)])
        if cell.option.startswith("pool") and beside[_key(cell)]
        else cell
        for cell in found
    ]


def _key(cell: Cell) -> tuple[object, ...]:
    return (cell.prompt_tokens, cell.first_token_ms, cell.between_tokens_ms, cell.option.endswith(_ONE_PASS))


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    request = ClusterRequest(
        target=PlannedModel.parse(arguments.target),
        target_gpus=parse_gpus(arguments.target_gpus),
        drafts=(PlannedModel.parse(arguments.draft),),
        draft_gpus=parse_gpus(arguments.draft_gpus),
        acceptance=arguments.acceptance,
        round_trips_seconds=tuple(ms / 1e3 for ms in arguments.delays),
        sidecar_round_trip_seconds=0.0,
    )
    found = list(main_options(request))
    made = [
        (option, ExpectedLoad(1, tokens, arguments.answer_tokens)) for tokens in arguments.prompts for option in found
    ]
    results: list[Cell] = []
    with ProcessPoolExecutor(arguments.parallel) as pool:
        ran = pool.map(run, *zip(*made, strict=True), [arguments] * len(made))
        for (option, load), points in zip(made, ran, strict=True):
            results += cells(option, load, points, arguments)
            for point in points:
                print(load.prompt_tokens, option.name, asdict(point), file=sys.stderr, flush=True)
    results = compared(results)
    print("| prompt | limits, ms | | clients | planned | over the target's GPUs | answers |")
    print(f"|{' --- |' * 7}")
    for cell in results:
        ratio = "" if cell.over_targets_gpus is None else f"{cell.over_targets_gpus:.2f}"
        print(
            f"| {cell.prompt_tokens} | {cell.first_token_ms:g}, {cell.between_tokens_ms:g} | {cell.option} "
            f"| {'≥' if cell.is_at_least else ''}{cell.clients:.1f} | {cell.planned} | {ratio} "
            f"| {cell.fewest_answers} |"
        )
    for source in dict.fromkeys(source for option in found for source in option.sources if source):
        print(f"step times: {source}")
    print("step times: others by formula")
    write_cells(arguments.out, "bench.capacity", argv, [asdict(cell) for cell in results])
    return 0


def _parser() -> argparse.ArgumentParser:
    def numbers(text: str) -> list[float]:
        return [float(number) for number in text.split(",")]

    def counts(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    def limits(text: str) -> list[LatencyLimits]:
        pairs = (pair.split("/") for pair in text.split(","))
        return [LatencyLimits(float(first) / 1e3, float(between) / 1e3) for first, between in pairs]

    parser = argparse.ArgumentParser(prog="bench.capacity", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", default="70B", metavar="MODEL")
    parser.add_argument("--target-gpus", default="4xA100-80", metavar="GPUS")
    parser.add_argument("--draft", default="1B", metavar="MODEL")
    parser.add_argument("--draft-gpus", default="A10G", metavar="GPUS")
    parser.add_argument("--acceptance", type=float, default=0.82, help="default 0.82, published of a distilled 1B")
    parser.add_argument("--delays", type=numbers, default=[0.5, 10.0], help="ms to a pool, there and back")
    parser.add_argument("--clients", type=counts, default=[2, 4, 8, 12, 16, 24, 32, 48], help="ascending")
    parser.add_argument("--prompts", type=counts, default=[128, 2000, 8000], help="tokens of each prompt")
    parser.add_argument("--answer-tokens", type=int, default=64)
    parser.add_argument("--answers", type=int, default=2000, help="of each point, at least")
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time; default 2")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument(
        "--limits",
        type=limits,
        default=limits("300/25,300/40,1000/25,1000/40"),
        metavar="FIRST/BETWEEN,...",
        help="p99 of the first token and between tokens, ms; default 300/25,300/40,1000/25,1000/40",
    )
    parser.add_argument("--out", type=Path, default=Path("bench/results/limits.json"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
