"""What a step takes before the first request has come: the depth controller should not have to guess."""

from __future__ import annotations

import time

from cluster.engine.batch import Segment
from cluster.engine.runner import ModelRunner
from cluster.speculation.costs import LearnedCurve

_REPEATS = 3
_MAX_SECONDS = 1.5


def profile_steps(runner: ModelRunner, curve: LearnedCurve, max_rows: int) -> None:
    """Teaches `curve` the time of steps of 1, 2, 4, ... rows, up to `max_rows` or what a second and a half allows."""
    started_at = time.perf_counter()
    num_rows = 1
    while num_rows <= max_rows and time.perf_counter() < started_at + _MAX_SECONDS:
        block_table = runner.blocks.allocate(runner.blocks.num_blocks_for(num_rows))
        if block_table is None:
            return
        segment = Segment([0] * num_rows, 0, block_table, num_logits=num_rows)
        curve.observe(num_rows, min(_seconds(runner, segment) for _ in range(_REPEATS)))
        runner.blocks.free(block_table)
        num_rows *= 2


def _seconds(runner: ModelRunner, segment: Segment) -> float:
    started_at = time.perf_counter()
    runner.run([segment]).sum().item()  # a GPU answers before it has computed
    return time.perf_counter() - started_at
