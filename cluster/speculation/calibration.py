"""How far what a plan promised comes true, apart for plans with drafts and without.

Whatever the model of costs leaves out (waits that differ, cohorts that take turns, drafts that slow the target down)
shows as a difference between the rate that was promised and the one that came of it. Only their ratio between the two
kinds of plan matters: it decides which of them really commits more.
"""

from __future__ import annotations

from dataclasses import dataclass

_WEIGHT = 0.2  # of a window in the average
_FORGET_SECONDS = 30.0  # after which what is not tried any more counts for little
_BOUNDS = (0.5, 1.5)


@dataclass(slots=True)
class _Window:
    has_drafts: bool
    rate: float  # tokens a second, promised
    num_rows: int
    started_at: float
    num_tokens: int = 0
    is_spoiled: bool = False


class Calibration:
    """A window lasts from one plan to the next."""

    def __init__(self) -> None:
        self._came_true = {True: 1.0, False: 1.0}  # with drafts, without
        self._window: _Window | None = None

    @property
    def handicap(self) -> float:
        """What a plan with drafts must promise, over one without, for both to come to the same."""
        return self._came_true[False] / self._came_true[True]

    def begin(self, *, has_drafts: bool, rate: float, num_rows: int, now: float) -> None:
        """A plan for `num_rows` sequences promises `rate` tokens a second; the window before is over."""
        window = self._window
        if window is not None:
            self._learn(window, num_rows, now)
        self._window = _Window(has_drafts, rate, num_rows, now)

    def count(self, num_tokens: int) -> None:
        """So many were committed."""
        if self._window is not None:
            self._window.num_tokens += num_tokens

    def spoil(self) -> None:
        """Something else took time in this window: it says nothing."""
        if self._window is not None:
            self._window.is_spoiled = True

    def _learn(self, window: _Window, num_rows: int, now: float) -> None:
        seconds, kind = now - window.started_at, window.has_drafts
        if seconds <= 0.0:
            return
        other = self._came_true[not kind]
        self._came_true[not kind] = other + (1.0 - other) * min(1.0, seconds / _FORGET_SECONDS)
        if window.is_spoiled or num_rows != window.num_rows or window.rate <= 0.0 or not window.num_tokens:
            return
        low, high = _BOUNDS
        share = min(max(window.num_tokens / seconds / window.rate, low), high)
        self._came_true[kind] += _WEIGHT * (share - self._came_true[kind])
