"""Pauses between retries, which grow; a random part keeps callers from retrying at the same time."""

from __future__ import annotations

import random

_FIRST_SECONDS = 0.1
_FACTOR = 2.0
_JITTER = 0.5  # share by which a pause may be longer or shorter


class Backoff:
    def __init__(self) -> None:
        self._num_failures = 0

    def succeeded(self) -> None:
        self._num_failures = 0

    def failed(self, most_seconds: float) -> float:
        """Returns the seconds to wait before the next attempt, about `most_seconds` at most."""
        # A float has no room for many more doublings.
        seconds = min(_FIRST_SECONDS * _FACTOR ** min(self._num_failures, 64), most_seconds)
        self._num_failures += 1
        return seconds * random.uniform(1 - _JITTER, 1 + _JITTER)
