"""The loads that measure the gain of speculation and its limits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from cluster.diagnosis.measurements import Examination, WorkerThreads, Workload
from cluster.errors import ConfigurationError
from services.running_cluster.load import LoadMaker, Numbers

TOLD_DEPTH = 5  # depth of the rounds for the reported acceptance and the waterfall


@dataclass(frozen=True, slots=True)
class ExaminationPlan:
    """The loads to measure. All except those that compare temperatures use the first of `temperatures`."""

    num_streams: int  # streams on each target
    temperatures: tuple[float, ...]
    max_depth: int  # maximum that requests may ask for
    seconds: float  # duration of a load, per repeat
    repeats: int

    @property
    def runs(self) -> list[Workload]:
        """Loads of one repeat, in order.

        The controller has three, as every loss is computed in proportion to them. They are spread over the repeat, so
        that some slow seconds of the machine affect them like the loads between them.
        """
        first, streams = self.temperatures[0], self.num_streams
        depths = sorted({min(depth, self.max_depth) for depth in (2, TOLD_DEPTH, 10)})
        told, auto = min(TOLD_DEPTH, self.max_depth), Workload(streams, first, None)
        fixed = [Workload(streams, first, depth) for depth in depths]
        return [
            Workload(streams, first, 0),
            auto,
            *fixed[:1],
            auto,
            *fixed[1:],
            Workload(1, first, told),
            auto,
            *(Workload(streams, temperature, told) for temperature in self.temperatures[1:]),
        ]


def examine(maker: LoadMaker, plan: ExaminationPlan, did_one: Callable[[], object] = lambda: None) -> Examination:
    """Puts the cluster under each load in turn, with the plan's repeats. Raises ConfigurationError."""
    grown: defaultdict[Workload, Numbers] = defaultdict(lambda: defaultdict(float))
    for repeat in range(plan.repeats):
        for workload in plan.runs:
            numbers = maker.run(workload, plan.seconds, part=repeat, num_parts=plan.repeats)
            for name, value in numbers.items():
                grown[workload][name] += value
            did_one()
    found = {workload: maker.measured(workload, numbers) for workload, numbers in grown.items()}
    first, streams = plan.temperatures[0], plan.num_streams
    without = found[Workload(streams, first, 0)].counts
    if not without.decode.count or not without.num_tokens:
        raise ConfigurationError(
            f"{maker.facts.url}: no decode step was counted in {without.seconds:.1f} s without drafts: give longer "
            "--seconds, or fewer --streams"
        )
    told = min(TOLD_DEPTH, plan.max_depth)
    return Examination(
        plain=found[Workload(streams, first, 0)],
        fixed=[
            one
            for workload, one in found.items()
            if workload.num_speculative_tokens and (workload.num_streams, workload.temperature) == (streams, first)
        ],
        alone=found[Workload(1, first, told)],
        auto=found[Workload(streams, first, None)],
        temperatures=[found[Workload(streams, temperature, told)] for temperature in plan.temperatures],
        max_depth=plan.max_depth,
        threads=[
            WorkerThreads(worker.pool, worker.name, worker.machine.num_threads, len(worker.machine.cpus))
            for worker in maker.facts.workers
        ],
    )
