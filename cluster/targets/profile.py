"""Measures the duration of steps before the first request, so that the depth controller need not guess it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from cluster.speculation.tuning import TRIAL_REPEATS, TRIAL_SECONDS


def profile_steps(
    time_step: Callable[[int], float | None], max_rows: int, clock: Callable[[], float] = time.perf_counter
) -> Iterator[tuple[int, float]]:
    """Yields rows and seconds of steps of 1, 2, 4, ... rows, up to `max_rows` or until `TRIAL_SECONDS` have passed.

    `time_step` runs a step and returns its seconds, or None if the step cannot run. Each step runs `TRIAL_REPEATS`
    times, and the shortest time counts.
    """
    started_at = clock()
    num_rows = 1
    while num_rows <= max_rows and clock() < started_at + TRIAL_SECONDS:
        seconds = [time_step(num_rows) for _ in range(TRIAL_REPEATS)]
        known = [one for one in seconds if one is not None]
        if not known:
            return
        yield num_rows, min(known)
        num_rows *= 2
