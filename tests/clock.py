"""A clock that a test sets."""

from __future__ import annotations


class Clock:
    """Shows `now`; every look at it takes `tick` seconds."""

    def __init__(self, now: float = 0.0, tick: float = 0.0) -> None:
        self.now = now
        self._tick = tick

    def __call__(self) -> float:
        self.now += self._tick
        return self.now
