"""The time of a forward pass, by the roofline of the GPUs or as measured.

    kernel    max(bytes / bandwidth, operations / peak), of linears, attention and sampling (`kernels`)
    step      the sum over kernels, which run one after the other, + 2 * layers * all-reduce (on several GPUs) + a fixed
              time

The roofline is that of Williams, Waterman, Patterson (CACM 2009). Reading weights takes most of a decode step, so a
verify step with few rows takes about the same time. Speculation depends on this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

from cluster.engine.memory_plan import PlannedModel
from cluster.planning.hardware import GpuGroup
from cluster.planning.kernels import Kernel, Segments, Step, num_rows, step_kernels
from cluster.simulated_engines.steps import StepCurve


class StepPredictor(Protocol):
    """A model on its devices."""

    def seconds(self, step: Step) -> float: ...

    @property
    def source(self) -> str:
        """Where the times are from; empty: formulae."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the data sheet's figures that programs reach. Assumed: this project did not measure them on a GPU."""

    bandwidth: float = 0.8
    compute: float = 0.6
    all_reduce_seconds: float = 10e-6  # time of an all-reduce of a few rows over NVLink; two per layer
    step_seconds: float = 0.3e-3  # scheduling, launches


BOUNDS = ("weights", "KV", "logits", "arithmetic", "all-reduces", "fixed")
"The bounds of a step's parts."

ASSUMED = Efficiency()


@dataclass(frozen=True, slots=True)
class Roofline:
    model: PlannedModel
    gpus: GpuGroup
    efficiency: Efficiency = ASSUMED

    logit_passes: int = 1  # passes of the sampler over a row's logits
    source: ClassVar = ""

    def seconds(self, step: Step) -> float:
        return sum(self.parts(step).values())

    def parts(self, step: Step) -> dict[str, float]:
        """Returns the seconds by bottleneck.

        The bottlenecks are the reads of `weights`, `KV` and `logits`, and `arithmetic`, `all-reduces` and `fixed`.
        """
        parts = dict.fromkeys(BOUNDS, 0.0)
        for kernel in step_kernels(self.model, step, self.logit_passes):
            reading, computing = self.read_seconds(kernel), self.compute_seconds(kernel)
            parts[kernel.reads if reading >= computing else "arithmetic"] += max(reading, computing)
        parts["all-reduces"] = self._all_reduces()
        parts["fixed"] = self.efficiency.step_seconds
        return parts

    def read_seconds(self, kernel: Kernel) -> float:
        return kernel.num_bytes / (self.gpus.bytes_per_second * self.efficiency.bandwidth) * self._share(kernel)

    def compute_seconds(self, kernel: Kernel) -> float:
        return kernel.num_operations / (self.gpus.flops_per_second * self.efficiency.compute) * self._share(kernel)

    def _share(self, kernel: Kernel) -> int:
        return 1 if kernel.is_sharded else self.gpus.count

    def _all_reduces(self) -> float:
        return 2 * self.model.num_layers * self.efficiency.all_reduce_seconds if self.gpus.count > 1 else 0.0


@dataclass(frozen=True)
class MeasuredSteps:
    """Steps interpolated linearly between measurements, which include the reads of the KV at that time."""

    points: tuple[tuple[int, float], ...]  # rows, seconds
    source: ClassVar = "measured here"

    @cached_property
    def _curve(self) -> StepCurve:
        return StepCurve([(rows, 1e3 * seconds) for rows, seconds in self.points])

    def seconds(self, step: Step) -> float:
        return self._curve.at(num_rows(step))


@dataclass(frozen=True, slots=True)
class NoSteps:
    """Steps of a drafter whose proposals take almost no time, such as n-gram."""

    source: ClassVar = ""

    def seconds(self, step: Step) -> float:
        return 0.0


_CHUNK_ROWS = 64  # rows of a sequence whose time for attention is arithmetic


def context_ms(steps: StepPredictor, num_seqs: int) -> tuple[float, float]:
    """Returns the ms that 1,000 cached tokens of one of `num_seqs` sequences add to a step: once, and for each row."""

    def added(rows: int) -> float:
        without, cached = (steps.seconds((Segments(num_seqs, rows, tokens),)) for tokens in (0, 1000))
        return 1e3 * (cached - without) / num_seqs

    return added(1), added(_CHUNK_ROWS) / _CHUNK_ROWS


def curve_points(
    steps: StepPredictor, num_seqs: float, cached_tokens: float, rows: Sequence[int]
) -> tuple[tuple[int, float], ...]:
    """Returns rows and milliseconds of steps of `num_seqs` sequences: a curve for simulated engines.

    The sequences share the rows evenly and have `cached_tokens` each.
    """
    return tuple((n, 1e3 * steps.seconds((Segments(num_seqs, n / num_seqs, cached_tokens),))) for n in rows)
