"""How far what was promised comes true, apart for steps with drafts and without.

Whatever the model of costs leaves out (waits that differ, drafts that come late, drafts that slow the target down)
shows as a difference between the tokens a second that were promised and those that came. Only their ratio between the
two kinds of step matters: it decides which of them really commits more.

A step is promised what its own sequences were planned to have. A plan is made for some steps ahead, in which sequences
end and others begin: held against these it would seem broken wherever answers are short, with drafts more than without.
"""

from __future__ import annotations

from dataclasses import dataclass

_STEPS = 16  # whose promises are held against what came of them together
_WEIGHT = 0.2  # of so many in the average
_FORGET_SECONDS = 30.0  # after which what is not tried any more counts for little
_BOUNDS = (0.5, 1.5)


@dataclass(frozen=True, slots=True)
class Promise:
    """What a step is expected to bring."""

    has_drafts: bool
    num_tokens: float
    seconds: float  # with its wait for proposals


@dataclass(slots=True)
class _Window:
    """Neighbouring steps of one kind."""

    has_drafts: bool
    num_steps: int = 0
    promised_tokens: float = 0.0
    promised_seconds: float = 0.0
    num_tokens: int = 0
    seconds: float = 0.0

    @property
    def share(self) -> float:
        """Tokens a second over those that were promised."""
        return self.num_tokens * self.promised_seconds / (self.promised_tokens * self.seconds)


class Calibration:
    def __init__(self) -> None:
        self._came_true = {True: 1.0, False: 1.0}  # with drafts, without
        self._window = _Window(has_drafts=False)

    @property
    def handicap(self) -> float:
        """What a plan with drafts must promise, over one without, for both to come to the same."""
        return self._came_true[False] / self._came_true[True]

    def observe(self, promise: Promise, num_tokens: int, seconds: float) -> None:
        """A step of which that was expected committed so many tokens in so long a time, its wait included."""
        if promise.has_drafts != self._window.has_drafts:
            self._begin(promise.has_drafts)
        window = self._window
        window.num_steps += 1
        window.promised_tokens += promise.num_tokens
        window.promised_seconds += promise.seconds
        window.num_tokens += num_tokens
        window.seconds += seconds
        other = self._came_true[not promise.has_drafts]
        self._came_true[not promise.has_drafts] = other + (1.0 - other) * min(1.0, seconds / _FORGET_SECONDS)
        if window.num_steps >= _STEPS:
            self._begin(promise.has_drafts)

    def _begin(self, has_drafts: bool) -> None:
        """A window of that kind, once the one before is learned from."""
        window, self._window = self._window, _Window(has_drafts)
        if window.seconds <= 0.0 or window.promised_seconds <= 0.0:
            return
        low, high = _BOUNDS
        weight = _WEIGHT * window.num_steps / _STEPS
        known = self._came_true[window.has_drafts]
        self._came_true[window.has_drafts] = known + weight * (min(max(window.share, low), high) - known)
