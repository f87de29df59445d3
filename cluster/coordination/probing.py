"""Keeps both sides of the comparison known: now and then a step of the kind that is not the rule.

While speculation goes on, a step in some seconds decodes plainly, to see what that takes by now. While it is off, a
shadow's proposal is verified in one, to see what rows cost. And what plans promise is held against what came of them
(`Calibration`): how far the two kinds differ in that decides how much speculation has to promise.
"""

from __future__ import annotations

from collections.abc import Callable

from cluster.speculation.calibration import Calibration, Promise

_PROBE_SECONDS = 3.0  # between two steps of the other kind
_DOUBT = 1.04  # while speculation is off it must promise so much more: estimates are not better than that


class Probing:
    """With `is_wanted` false no step is of the other kind."""

    def __init__(self, clock: Callable[[], float], *, is_wanted: bool) -> None:
        self.is_probing = False  # this step is of the other kind
        self._is_wanted = is_wanted
        self._clock = clock
        self._calibration = Calibration()
        self._probe_at = clock() + _PROBE_SECONDS
        self._is_on = True  # somebody gets drafts
        self._step_began_at = clock()  # its waits are a part of it

    @property
    def handicap(self) -> float:
        """By how much less came of plans with drafts than of plans without, in proportion to what they promised."""
        return self._calibration.handicap

    @property
    def min_gain(self) -> float:
        """What a plan with drafts must promise, over one without."""
        return (1.0 if self._is_on else _DOUBT) * self.handicap

    def planned(self, *, has_drafts: bool) -> None:
        """A plan holds until the next."""
        self._is_on = has_drafts

    def begin_step(self, *, awaits_shadow: bool) -> None:
        """Decides of what kind the step is. With `awaits_shadow` a probe goes on until a shadow's drafts were verified
        (`done`)."""
        now = self._clock()
        self._step_began_at = now
        self.is_probing = self._is_wanted and now >= self._probe_at
        if self.is_probing and not awaits_shadow:
            self._probe_at = now + _PROBE_SECONDS

    def end_step(self, promise: Promise | None, num_tokens: int, now: float) -> None:
        """It committed `num_tokens` until `now`. One of the other kind, or that did something else beside, such as
        prefill, was promised nothing."""
        if promise is not None:
            self._calibration.observe(promise, num_tokens, now - self._step_began_at)

    def done(self) -> None:
        self._probe_at = self._clock() + _PROBE_SECONDS
