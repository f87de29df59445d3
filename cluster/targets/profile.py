"""Measures the duration of steps before the first request, so that the depth controller need not guess it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

_REPEATS = 3
_MAX_SECONDS = 1.5


def profile_steps(time_step: Callable[[int], float | None], max_rows: int) -> Iterator[tuple[int, float]]:
    """Yields rows and seconds of steps of 1, 2, 4, ... rows, up to `max_rows` or until 1.5 seconds have passed.

    `time_step` runs a step and returns its seconds, or None if the step cannot run. Each step runs three times, and the
    shortest time counts.
    """
    started_at = time.perf_counter()
    num_rows = 1
    while num_rows <= max_rows and time.perf_counter() < started_at + _MAX_SECONDS:
        seconds = [time_step(num_rows) for _ in range(_REPEATS)]
        known = [one for one in seconds if one is not None]
        if not known:
            return
        yield num_rows, min(known)
        num_rows *= 2
