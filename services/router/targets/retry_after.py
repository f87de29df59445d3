"""Computes `Retry-After` for requests without a target from the last periods without one."""

from __future__ import annotations

import math
from collections import deque

from cluster.errors import UnavailableError

_LEAST_S = UnavailableError.retry_after or 0
_MOST_S = 60  # if a target loads a large model for longer, clients retry once a minute
_NUM_REMEMBERED = 8


class RetryAfter:
    """Remembers the lengths of the last periods without a target.

    Times are in seconds of one clock. Initially there is no target.
    """

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
    def lost_at(self) -> float | None:
        """When the last target went; None while there is one, and before the first one."""
        return self._since if self._lengths else None

    @property
    def retry_after(self) -> int:
        """Seconds after which to retry: the longest remembered outage, within bounds."""
        return min(max(_LEAST_S, math.ceil(max(self._lengths, default=0.0))), _MOST_S)
