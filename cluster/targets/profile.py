"""What a step takes before the first request has come: the depth controller should not have to guess."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

_REPEATS = 3
_MAX_SECONDS = 1.5


def profile_steps(time_step: Callable[[int], float | None], max_rows: int) -> Iterator[tuple[int, float]]:
    """Rows and seconds of steps of 1, 2, 4, ... rows, up to `max_rows` or what a second and a half allows.

    `time_step` runs one; None: it cannot be tried.
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
