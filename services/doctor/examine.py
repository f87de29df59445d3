"""The loads that tell what speculation gives and why not more."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from cluster.diagnosis.measurements import Examination, Workload
from cluster.errors import ConfigurationError
from services.running_cluster.load import LoadMaker, Numbers

TOLD_DEPTH = 5  # acceptance and the waterfall are told of rounds so deep
_AUTO_TIMES = 3  # longer than the others: every loss is told in proportion to what the controller's run gives


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. The first of `temperatures` is that of all loads but those that compare them."""

    num_streams: int  # on each target
    temperatures: tuple[float, ...]
    max_depth: int  # that requests may ask for
    seconds: float  # of a load, each time; the controller's is longer
    repeats: int

    @property
    def workloads(self) -> list[Workload]:
        first, streams = self.temperatures[0], self.num_streams
        depths = sorted({min(depth, self.max_depth) for depth in (2, TOLD_DEPTH, 10)})
        told = min(TOLD_DEPTH, self.max_depth)
        return [
            Workload(streams, first, 0),
            *(Workload(streams, first, depth) for depth in depths),
            Workload(1, first, told),
            Workload(streams, first, None),
            *(Workload(streams, temperature, told) for temperature in self.temperatures[1:]),
        ]


def examine(maker: LoadMaker, plan: Plan, did_one: Callable[[], object] = lambda: None) -> Examination:
    """Puts the cluster under each load, all of them in turn as often as the plan says. Raises ConfigurationError."""
    workloads = list(dict.fromkeys(plan.workloads))
    grown: dict[Workload, Numbers] = {workload: defaultdict(float) for workload in workloads}
    for repeat in range(plan.repeats):
        for workload in workloads:
            times = _AUTO_TIMES if workload.num_speculative_tokens is None else 1
            numbers = maker.run(workload, times * plan.seconds, part=repeat, num_parts=plan.repeats)
            for name, value in numbers.items():
                grown[workload][name] += value
            did_one()
    found = {workload: maker.measured(workload, numbers) for workload, numbers in grown.items()}
    without = found[workloads[0]].counts
    if not without.decode.count or not without.num_tokens:
        raise ConfigurationError(
            f"{maker.facts.url}: no decode step was counted in {without.seconds:.1f} s without drafts: give longer "
            "--seconds, or fewer --streams"
        )
    first, streams = plan.temperatures[0], plan.num_streams
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
    )
