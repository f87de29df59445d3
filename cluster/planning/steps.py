"""What a forward pass takes: by the roofline of the GPUs, or as it was measured.

    bytes     weights + KV of all sequences, read once a step
    FLOPs     2 * parameters * rows (attention's own are left out: under a tenth at 4,096 tokens)
    step      max(bytes / bandwidth, FLOPs / peak) + 2 * layers * all-reduce (on several GPUs) + a fixed time

The roofline is that of Williams, Waterman, Patterson (CACM 2009); that a decode step is bound by reading weights and a
verify step of few rows therefore costs as much is what speculation lives on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from cluster.engine.memory_plan import PlannedModel
from cluster.planning.hardware import GpuGroup
from cluster.simulation.steps import StepCurve


class Steps(Protocol):
    """A model on its devices."""

    def seconds(self, num_rows: float, kv_tokens: float) -> float:
        """Of a step of `num_rows` rows whose sequences have `kv_tokens` tokens in the KV cache together. Rows may be
        fractions: means of steps that differ."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """How much of a data sheet is had. Assumptions, none of which was measured on a GPU by this project."""

    bandwidth: float = 0.8
    compute: float = 0.6
    all_reduce_seconds: float = 10e-6  # of a few rows, over NVLink; two a layer
    step_seconds: float = 0.3e-3  # scheduling, launches, sampling


ASSUMED = Efficiency()
IDEAL = Efficiency(bandwidth=1.0, compute=1.0, all_reduce_seconds=0.0, step_seconds=0.0)


@dataclass(frozen=True, slots=True)
class Roofline:
    model: PlannedModel
    gpus: GpuGroup
    efficiency: Efficiency = ASSUMED

    def seconds(self, num_rows: float, kv_tokens: float) -> float:
        reading = self.read_seconds(kv_tokens)
        computing = self.compute_seconds(num_rows)
        return max(reading, computing) + self._all_reduces() + self.efficiency.step_seconds

    def read_seconds(self, kv_tokens: float) -> float:
        num_bytes = self.model.weight_bytes + kv_tokens * self.model.kv_bytes_per_token
        return num_bytes / (self.gpus.bytes_per_second * self.efficiency.bandwidth)

    def compute_seconds(self, num_rows: float) -> float:
        return 2 * self.model.num_parameters * num_rows / (self.gpus.flops_per_second * self.efficiency.compute)

    def _all_reduces(self) -> float:
        return 2 * self.model.num_layers * self.efficiency.all_reduce_seconds if self.gpus.count > 1 else 0.0


@dataclass(frozen=True)
class MeasuredSteps:
    """Linear between what was measured; the KV that is read is in it, as much as there was."""

    points: tuple[tuple[int, float], ...]  # rows, seconds

    @cached_property
    def _curve(self) -> StepCurve:
        return StepCurve([(rows, 1e3 * seconds) for rows, seconds in self.points])

    def seconds(self, num_rows: float, kv_tokens: float) -> float:
        return self._curve.at(num_rows)


@dataclass(frozen=True, slots=True)
class NoSteps:
    """Of a drafter whose proposals cost nothing beside a step, such as n-gram."""

    def seconds(self, num_rows: float, kv_tokens: float) -> float:
        return 0.0


def curve_points(steps: Steps, kv_tokens: float, rows: Sequence[int]) -> tuple[tuple[int, float], ...]:
    """Rows and milliseconds of `steps` while `kv_tokens` are in the cache: a curve for simulated engines."""
    return tuple((count, 1e3 * steps.seconds(count, kv_tokens)) for count in rows)
