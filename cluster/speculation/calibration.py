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
    num_tokens: int = 0  # in the steps that count
    seconds: float = 0.0  # that these took


class Calibration:
    """A window lasts from one plan to the next; steps that do something else beside do not count in it."""

    def __init__(self) -> None:
        self._came_true = {True: 1.0, False: 1.0}  # with drafts, without
        self._window: _Window | None = None
        self._step_started_at: float | None = None  # None: the step does not count

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

    def begin_step(self, now: float) -> None:
        """Its waits are a part of it."""
        self._step_started_at = now

    def skip_step(self) -> None:
        """Something else takes time in this step, such as prefill: it says nothing."""
        self._step_started_at = None

    def end_step(self, num_tokens: int, now: float) -> None:
        """So many were committed."""
        if self._window is not None and self._step_started_at is not None:
            self._window.num_tokens += num_tokens
            self._window.seconds += now - self._step_started_at

    def _learn(self, window: _Window, num_rows: int, now: float) -> None:
        kind = window.has_drafts
        other = self._came_true[not kind]
        self._came_true[not kind] = other + (1.0 - other) * min(1.0, (now - window.started_at) / _FORGET_SECONDS)
        if num_rows != window.num_rows or window.rate <= 0.0 or window.seconds <= 0.0:
            return
        low, high = _BOUNDS
        share = min(max(window.num_tokens / window.seconds / window.rate, low), high)
        self._came_true[kind] += _WEIGHT * (share - self._came_true[kind])
