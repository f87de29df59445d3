"""Computes `Retry-After` for requests that find no target: the longest of the last absences."""

from __future__ import annotations

import math
from collections import deque

from cluster.errors import UnavailableError

_LEAST_S = UnavailableError.retry_after or 0
_MOST_S = 60  # a target that takes longer to load a large model is found by polling once a minute
_NUM_REMEMBERED = 8


class RetryAfter:
    """Times are seconds of one clock. At first there is no target."""

    def __init__(self, now: float) -> None:
        self._since: float | None = now
        self._lengths: deque[float] = deque(maxlen=_NUM_REMEMBERED)

    def note(self, *, has_target: bool, now: float) -> None:
        if not has_target:
            self._since = now if self._since is None else self._since
        elif self._since is not None:
            self._lengths.append(now - self._since)
            self._since = None

    @property
    def retry_after(self) -> int:
        """Seconds, within bounds."""
        return min(max(_LEAST_S, math.ceil(max(self._lengths, default=0.0))), _MOST_S)
