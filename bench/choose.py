"""Checks what `outrider plan choose` names: `python -m bench.choose`.

A cell is a workload on some GPUs within some limits (`bench/choose_cells.json`, committed before the first run). In
each cell every option runs in virtual time (`bench.placed`), with the depth that the planner takes, or that the
controller chooses in a pool (to which the planner's run-ahead was fitted). It runs with more or fewer clients until the
limits lie between two runs. The option that the planner names loses if another one, as simulated, serves over 5 % more
requests per dollar. A pool has one draft worker for each target.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.placed import Placed, SimulatedPoint, within
from bench.result import write_cells
from cluster.engine.memory_plan import PlannedModel
from cluster.planning.choice import MAX_SEQS, Capacity, best, capacity
from cluster.planning.hardware import parse_gpus
from cluster.planning.options import ClusterRequest, main_options
from cluster.planning.prediction import plan
from cluster.planning.workloads import WORKLOADS, TypicalWorkload

CELLS = Path("bench/choose_cells.json")
BAR = 0.05  # of the best option's requests per dollar
_STEP = 1.25  # between the clients of two runs
_MAX_RUNS = 5  # of an option in a cell


@dataclass(frozen=True, slots=True)
class Asked:
    """A cell of the file. Limits are in ms; None: those of the workload."""

    workload: str
    target: str
    target_gpus: str
    draft_gpus: str
    first_token_ms: float | None = None
    between_tokens_ms: float | None = None

    @property
    def resolved(self) -> TypicalWorkload:
        found = next(one for one in WORKLOADS if one.name == self.workload)
        limits = found.limits
        if self.first_token_ms is not None:
            limits = replace(limits, first_token=self.first_token_ms / 1e3)
        if self.between_tokens_ms is not None:
            limits = replace(limits, between_tokens=self.between_tokens_ms / 1e3)
        return replace(found, limits=limits)

    def capacities(self) -> list[Capacity]:
        workload = self.resolved
        request = ClusterRequest(
            target=PlannedModel.parse(self.target),
            target_gpus=parse_gpus(self.target_gpus),
            drafts=(PlannedModel.parse("1B"),),
            draft_gpus=parse_gpus(self.draft_gpus),
            acceptance=workload.draft.acceptance,
            round_trips_seconds=(0.0005,),
            sidecar_round_trip_seconds=0.0,
            head_acceptance=workload.head.acceptance,
            one_pass_acceptance=workload.one_pass.acceptance,
            ngram_acceptance=workload.ngram.acceptance,
        )
        return [capacity(option, workload.load, workload.limits) for option in main_options(request)]


@dataclass(frozen=True, slots=True)
class Ran:
    """An option in a cell. Requests per dollar are those within the limits."""

    option: str
    planned_clients: int
    planned_k: int
    planned: float  # requests per dollar
    simulated: float
    points: list[SimulatedPoint]


@dataclass(frozen=True, slots=True)
class Judged:
    asked: Asked
    named: str
    regret: float  # share of the best option's requests per dollar that the named one lacks
    options: list[Ran]

    @property
    def best(self) -> Ran:
        return max(self.options, key=lambda one: one.simulated)


def run(planned: Capacity, workload: TypicalWorkload, num_answers: int) -> Ran:
    """Runs the option with the planned clients, then with more or fewer."""
    option, limits = planned.option, workload.limits
    depth = 0 if planned.plan is None else planned.plan.round.num_speculative_tokens
    first = 1 if planned.plan is None else planned.plan.num_seqs
    is_apart = option.drafting is not None and option.drafting.runs_ahead
    fixed_k = None if is_apart and depth else depth
    points: dict[int, SimulatedPoint] = {}
    clients = first
    while clients not in points and len(points) < _MAX_RUNS:
        placed = Placed(option, replace(workload.load, num_seqs=clients), fixed_k)
        points[clients] = placed.run(num_answers)
        is_within = points[clients].excess(limits) <= 1
        others = [number for number in points if (points[number].excess(limits) <= 1) != is_within]
        if others or (is_within and math.isinf(limits.between_tokens)):
            break
        clients = min(MAX_SEQS, max(clients + 1, round(clients * _STEP))) if is_within else int(clients / _STEP)
        if not clients:
            break
    ascending = [points[number] for number in sorted(points)]
    found = within(ascending, limits)
    dollars = _dollars_per_hour(planned, workload)
    return Ran(
        option.name,
        0 if planned.plan is None else first,
        depth,
        planned.requests_per_dollar,
        3600 * found.requests_per_second / dollars,
        ascending,
    )


def _dollars_per_hour(planned: Capacity, workload: TypicalWorkload) -> float:
    """Returns the price of a target and of its draft device, if it drafts."""
    found = planned.plan or plan(planned.option, workload.load)
    assert found.dollars_per_hour is not None
    return found.dollars_per_hour


def _like(planned: Capacity, plain: Ran) -> Ran | None:
    """Returns the run without speculation as that of an option that does not draft; None: it drafts."""
    found = planned.plan
    if found is None or found.round.num_speculative_tokens or found.num_seqs != plain.planned_clients:
        return None
    return replace(plain, option=planned.option.name)


def judge(asked: Asked, num_answers: int) -> Judged:
    found = asked.capacities()
    plain = run(found[0], asked.resolved, num_answers)
    options = [plain, *(_like(one, plain) or run(one, asked.resolved, num_answers) for one in found[1:])]
    named = best(found).option.name
    own = next(one for one in options if one.option == named)
    most = max(one.simulated for one in options)
    return Judged(asked, named, 1 - own.simulated / most if most else 0.0, options)


def to_json(one: Judged) -> dict[str, Any]:
    return asdict(one) | {"best": one.best.option}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.choose", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cells", type=Path, default=CELLS)
    parser.add_argument("--answers", type=int, default=400, help="of each run, at least")
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("bench/results/choose.json"))
    arguments = parser.parse_args(argv)
    asked = [Asked(**cell) for cell in json.loads(arguments.cells.read_text(encoding="utf-8"))]
    print("| workload | target | first token, between ms | named | best as simulated | regret |\n|" + " --- |" * 6)
    judged: list[Judged] = []
    with ProcessPoolExecutor(arguments.parallel) as pool:
        for one in pool.map(judge, asked, [arguments.answers] * len(asked)):
            judged.append(one)
            cell = one.asked
            print(
                f"| {cell.workload} | {cell.target} on {cell.target_gpus}, {cell.draft_gpus} "
                f"| {cell.first_token_ms or 'default'}, {cell.between_tokens_ms or 'default'} "
                f"| {one.named} | {one.best.option} | {one.regret:.1%} |",
                flush=True,
            )
            write_cells(arguments.out, "bench.choose", argv, [to_json(done) for done in judged])
    lost = [one for one in judged if one.regret > BAR]
    print(f"\n{len(judged) - len(lost)} of {len(judged)} cells are within {BAR:.0%} of the best")
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
