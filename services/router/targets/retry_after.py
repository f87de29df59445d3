"""When a client who finds no target may ask again: after as long as it took before until one was there."""

from __future__ import annotations

import math
from collections import deque

from cluster.errors import UnavailableError

_LEAST_S = UnavailableError.retry_after or 0
_MOST_S = 60  # whoever loads a large model for longer is found by asking once a minute
_NUM_REMEMBERED = 8


class RetryAfter:
    """Times are seconds of one clock. At first nobody is there."""

    def __init__(self, now: float) -> None:
        self._since: float | None = now
        self._lengths: deque[float] = deque(maxlen=_NUM_REMEMBERED)

    def note(self, *, is_anybody_there: bool, now: float) -> None:
        if not is_anybody_there:
            self._since = now if self._since is None else self._since
        elif self._since is not None:
            self._lengths.append(now - self._since)
            self._since = None

    @property
    def retry_after(self) -> int:
        """The longest of the last ones, in seconds, within bounds."""
        return min(max(_LEAST_S, math.ceil(max(self._lengths, default=0.0))), _MOST_S)
