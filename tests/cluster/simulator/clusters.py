"""Clusters in virtual time for the tests."""

from __future__ import annotations

from cluster.config import Config
from cluster.config.file import load_config
from cluster.planning.overheads import NOTHING, Programs
from cluster.simulator.cluster import Choose, MeasuredSpan, SimulatedCluster, least_loaded
from cluster.simulator.figures import Figures
from cluster.simulator.traffic import ClosedTraffic, Lengths, Traffic

PROMPTS, ANSWERS = Lengths(16, 48), Lengths(32, 96)


def config_of(*settings: str) -> Config:
    own = ("target.engine=simulated", "draft.drafter=simulated", "target.enable_prefix_caching=false")
    return load_config(None, [*own, *settings])


def streams(number: int, seconds: float, seed: int = 0) -> ClosedTraffic:
    return ClosedTraffic(number, seconds, PROMPTS, ANSWERS, seed)


def ran(
    traffic: Traffic,
    *settings: str,
    num_blocks: int = 100_000,
    span: MeasuredSpan | None = None,
    seed: int = 0,
    programs: Programs = NOTHING,
    choose: Choose = least_loaded,
) -> SimulatedCluster:
    cluster = SimulatedCluster(
        config_of(*settings), traffic, num_blocks, span or MeasuredSpan(10.0, 60.0), seed, programs, choose
    )
    cluster.run()
    return cluster


def figures_of(number: int, *settings: str, seconds: float = 60.0, seed: int = 0) -> Figures:
    """Returns the figures of `number` streams, measured after a quarter of `seconds`."""
    span = MeasuredSpan(seconds / 4, seconds, is_cut=True)
    return ran(streams(number, seconds, seed), *settings, span=span, seed=seed).figures()
