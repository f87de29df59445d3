"""Steps that take a set time and compute nothing."""

from __future__ import annotations

import bisect
import ctypes
import sys
import threading
import time
from collections.abc import Sequence
from typing import Protocol

_PR_SET_TIMERSLACK = 29
_TIMER_SLACK_NS = 1
_prepared = threading.local()


class StepCurve:
    """Seconds of a step by a count: linear between points (count, milliseconds).

    Flat before the first point; after the last it continues the last slope.
    """

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        self._counts = [count for count, _ in points]
        self._seconds = [ms / 1e3 for _, ms in points]

    def at(self, count: float) -> float:
        counts, seconds = self._counts, self._seconds
        if count <= counts[0] or len(counts) == 1:
            return seconds[0]
        right = min(bisect.bisect_left(counts, count), len(counts) - 1)
        slope = (seconds[right] - seconds[right - 1]) / (counts[right] - counts[right - 1])
        return seconds[right - 1] + slope * (count - counts[right - 1])


class Timekeeper(Protocol):
    """The clock of simulated engines, in seconds."""

    def now(self) -> float: ...

    def sleep_until(self, deadline: float) -> None: ...


class RealTime:
    """`time.perf_counter()`."""

    def now(self) -> float:
        return time.perf_counter()

    def sleep_until(self, deadline: float) -> None:
        _sleep_until(deadline)


REAL_TIME = RealTime()


def _sleep_until(deadline: float) -> None:
    """Sleeps until `deadline` without spinning; on Linux it takes about 10 µs longer."""
    if not getattr(_prepared, "is_done", False):
        _prepared.is_done = True
        if sys.platform == "linux":
            # The kernel lets a thread sleep 50 µs longer than it asked for, to wake several at once.
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _TIMER_SLACK_NS)
    seconds = deadline - time.perf_counter()
    if seconds > 0:
        time.sleep(seconds)
