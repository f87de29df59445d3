"""Watches an engine's step loop: detects a loop that is stuck although its process still answers.

Also measures the time for which the loop has had work.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from cluster.telemetry.metrics import Reading

_MIN_SECONDS = 5.0
_TIMES_THE_LONGEST = 4.0
_NUM_STEPS = 100
_FIRST_STEP_SECONDS = 120.0  # the first step may compile or record graphs


class Heartbeat:
    """Detects a stuck step loop. Call `begin` and `end` in the loop's thread; the rest is thread-safe.

    The loop is stuck if a step takes more than 5 seconds and more than 4 times as long as the longest of the last 100
    steps. The limit of the first step is 120 seconds. Work before the first step, such as loading, does not count, and
    neither does time without work.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_begun = 0  # steps that have begun and not ended: a step may begin before the previous one ends
        self._begun_at: float | None = None  # start of the oldest of these steps, or end of the step before it
        self._seconds: deque[float] = deque(maxlen=_NUM_STEPS)
        self._limit = _FIRST_STEP_SECONDS
        self._busy_seconds = 0.0  # time of all ended steps

    def begin(self) -> None:
        self._num_begun += 1
        if self._begun_at is None:
            self._begun_at = self._clock()

    def end(self) -> None:
        assert self._begun_at is not None
        now = self._clock()
        self._seconds.append(now - self._begun_at)
        self._busy_seconds += self._seconds[-1]
        self._num_begun -= 1
        self._begun_at = now if self._num_begun else None
        self._limit = max(_MIN_SECONDS, _TIMES_THE_LONGEST * max(self._seconds))

    @property
    def is_stuck(self) -> bool:
        begun_at = self._begun_at
        return begun_at is not None and self._clock() - begun_at > self._limit

    @property
    def busy(self) -> Reading:
        description = (
            "Time with work for the engine's loop: its steps, their waits for proposals, and the time between them."
        )
        return Reading("outrider_engine_busy_seconds", description, self._busy_seconds, is_counter=True)
