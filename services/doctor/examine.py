"""The loads that measure the gain of speculation and its limits."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from dataclasses import dataclass

from cluster.diagnosis.measurements import Examination, WorkerThreads, Workload
from cluster.errors import ConfigurationError
from services.running_cluster.load import LoadMaker, Numbers

logger = logging.getLogger(__name__)

REPORTED_DEPTH = 5  # depth of the rounds for the reported acceptance and the waterfall
_RAMP_SECONDS = 1.0  # first guess of the time until all streams of a load are busy


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
        depths = sorted({min(depth, self.max_depth) for depth in (2, REPORTED_DEPTH, 10)})
        reported, auto = min(REPORTED_DEPTH, self.max_depth), Workload(streams, first, None)
        fixed = [Workload(streams, first, depth) for depth in depths]
        return [
            Workload(streams, first, 0),
            auto,
            *fixed[:1],
            auto,
            *fixed[1:],
            Workload(1, first, reported),
            auto,
            *(Workload(streams, temperature, reported) for temperature in self.temperatures[1:]),
        ]


def examine(maker: LoadMaker, plan: ExaminationPlan) -> Examination:
    """Puts the cluster under each load in turn, with the plan's repeats, and logs each. Raises ConfigurationError."""
    total, num_done, started_at = plan.repeats * len(plan.runs), 0, time.monotonic()
    grown: defaultdict[Workload, Numbers] = defaultdict(lambda: defaultdict(float))
    for repeat in range(plan.repeats):
        for workload in plan.runs:
            each = (time.monotonic() - started_at) / num_done if num_done else plan.seconds + _RAMP_SECONDS
            logger.info(
                "load %d of %d: %s; about %.0f s left", num_done + 1, total, _text(workload), each * (total - num_done)
            )
            numbers = maker.run(workload, plan.seconds, part=repeat, num_parts=plan.repeats)
            for name, value in numbers.items():
                grown[workload][name] += value
            num_done += 1
    found = {workload: maker.measured(workload, numbers) for workload, numbers in grown.items()}
    first, streams = plan.temperatures[0], plan.num_streams
    without = found[Workload(streams, first, 0)].counts
    if not without.decode.count or not without.num_tokens:
        raise ConfigurationError(
            f"{maker.facts.url}: no decode step was counted in {without.seconds:.1f} s without drafts: give longer "
            "--seconds, or fewer --streams"
        )
    reported = min(REPORTED_DEPTH, plan.max_depth)
    return Examination(
        plain=found[Workload(streams, first, 0)],
        fixed=[
            one
            for workload, one in found.items()
            if workload.num_speculative_tokens and (workload.num_streams, workload.temperature) == (streams, first)
        ],
        alone=found[Workload(1, first, reported)],
        auto=found[Workload(streams, first, None)],
        temperatures=[found[Workload(streams, temperature, reported)] for temperature in plan.temperatures],
        max_depth=plan.max_depth,
        threads=[
            WorkerThreads(worker.pool, worker.name, worker.machine.num_threads, len(worker.machine.cpus))
            for worker in maker.facts.workers
        ],
    )


def _text(workload: Workload) -> str:
    depth = workload.num_speculative_tokens
    streams = "1 stream" if workload.num_streams == 1 else f"{workload.num_streams} streams"
    return f"{streams}, k = {'auto' if depth is None else depth}, temperature {workload.temperature:g}"
