"""Metrics of the workers, by Prometheus's rules: raw counters and histograms; the reader computes rates.

A metric has vLLM's name if vLLM has it; other names start with `outrider_`.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

# Disables the start times of series, which double the number of series and which no dashboard uses.
disable_created_metrics()  # type: ignore[no-untyped-call]

_ENGINE = "0"  # vLLM numbers the engines behind a page; a worker has one

LATENCY_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class Tally:
    """A histogram in plain numbers. Not thread-safe."""

    def __init__(self, limits: Sequence[float]) -> None:
        self._limits = limits
        self._counts = [0] * (len(limits) + 1)  # by the first limit that the value does not exceed
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.sum += value
        self._counts[bisect.bisect_left(self._limits, value)] += 1

    def buckets(self) -> list[tuple[str, int]]:
        """Returns pairs of a limit and the number of values up to this limit."""
        limits = [*(str(float(limit)) for limit in self._limits), "+Inf"]
        return list(zip(limits, itertools.accumulate(self._counts), strict=True))

    def reading(self, name: str, documentation: str) -> Reading:
        (*_, (_, count)) = buckets = self.buckets()
        return Reading(name, documentation, count, buckets=tuple(buckets), sum=self.sum)


@dataclass(frozen=True, slots=True)
class Reading:
    """A value of a metric at the time when the worker's page is read."""

    name: str
    documentation: str
    value: float
    is_counter: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    buckets: tuple[tuple[str, int], ...] = ()  # buckets of a histogram, whose `value` is its count
    sum: float = 0.0  # sum of a histogram


@dataclass(slots=True)
class StepTime:
    """Time spent in one kind of step. The mean over a minute, for the target's verify steps:

    rate(outrider_step_seconds_total{kind="verify"}[1m]) / rate(outrider_steps_total{kind="verify"}[1m])
    """

    num_steps: int = 0
    seconds: float = 0.0

    @staticmethod
    def kind(*, has_prompt: bool, has_drafts: bool) -> str:
        """Returns the kind of a step: it has a chunk of a prompt, or drafts, or neither."""
        return "prefill" if has_prompt else "verify" if has_drafts else "decode"

    def add(self, seconds: float) -> None:
        self.num_steps += 1
        self.seconds += seconds

    def readings(self, prefix: str, what: str, **labels: str) -> Iterator[Reading]:
        yield Reading(f"{prefix}s", f"{what}.", self.num_steps, is_counter=True, labels=labels)
        yield Reading(f"{prefix}_seconds", f"{what}: time.", self.seconds, is_counter=True, labels=labels)


class WorkerMetrics(Collector):
    """Metrics page of a worker, with values that are read from the engine on request.

    Bytes on the wire per committed token, excluding openings:
        sum(rate(outrider_link_bytes_total{kind="round"}[1m])) / rate(outrider_committed_tokens_total[1m])
    """

    def __init__(self, read: Callable[[], Iterable[Reading]], model_name: str) -> None:
        """`model_name`: the label of the metrics that have vLLM's names, together with `engine`."""
        self.registry = CollectorRegistry()
        self._read = read
        self._vllm_labels = {"model_name": model_name, "engine": _ENGINE}
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for reading in self._read():
            family = families.get(reading.name)
            if family is None:
                family = families[reading.name] = _family(reading)
            labels = (self._vllm_labels if reading.name.startswith("vllm:") else {}) | dict(reading.labels)
            if reading.buckets:
                for limit, count in reading.buckets:
                    family.add_sample(f"{reading.name}_bucket", labels | {"le": limit}, count)
                family.add_sample(f"{reading.name}_count", labels, reading.value)
                family.add_sample(f"{reading.name}_sum", labels, reading.sum)
            else:
                family.add_sample(reading.name + ("_total" if reading.is_counter else ""), labels, reading.value)
        yield from families.values()


def _family(reading: Reading) -> Metric:
    if reading.buckets:
        return HistogramMetricFamily(reading.name, reading.documentation)
    kind = CounterMetricFamily if reading.is_counter else GaugeMetricFamily
    return kind(reading.name, reading.documentation)
