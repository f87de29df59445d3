"""Limits of each key at this router: requests per minute, and concurrent requests."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from services.router.errors import RateLimitError

_WINDOW_S = 60.0
_BUSY_RETRY_S = 1  # another request of the key has to end first


class KeyLimits:
    """Limits for each key; None: no limit. Not thread-safe."""

    def __init__(
        self,
        requests_per_minute: int | None,
        max_requests: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._requests_per_minute = requests_per_minute
        self._max_requests = max_requests
        self._clock = clock
        self._began_at: dict[str, deque[float]] = {}  # start times of the last `requests_per_minute` requests
        self._num_running: dict[str, int] = {}

    @contextmanager
    def entered(self, name: str) -> Iterator[None]:
        """Counts a request of `name` while it runs.

        Raises RateLimitError if a limit is reached; the refused request is not counted.
        """
        num_running = self._num_running.get(name, 0)
        if self._max_requests is not None and num_running >= self._max_requests:
            raise RateLimitError(
                f"the key {name!r} has {num_running} requests running, which is its limit; wait for one to end",
                retry_after=_BUSY_RETRY_S,
            )
        self._count_beginning(name)
        self._num_running[name] = num_running + 1
        try:
            yield
        finally:
            self._num_running[name] -= 1

    def _count_beginning(self, name: str) -> None:
        limit = self._requests_per_minute
        if limit is None:
            return
        began_at = self._began_at.setdefault(name, deque(maxlen=limit))
        now = self._clock()
        if len(began_at) == limit and (wait := began_at[0] + _WINDOW_S - now) > 0:
            raise RateLimitError(
                f"the key {name!r} has made {limit} requests within a minute, which is its limit; slow down",
                retry_after=max(1, math.ceil(wait)),
            )
        began_at.append(now)
