"""Efficiency of a GPU that reaches its data sheet and does nothing else."""

from __future__ import annotations

from cluster.planning.steps import Efficiency

IDEAL = Efficiency(bandwidth=1.0, compute=1.0, all_reduce_seconds=0.0, step_seconds=0.0)
