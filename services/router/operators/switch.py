"""Operator switch: the percentage of new requests that may speculate.

The switch does not change the tokens of an answer, except with `acceptance: rejection`, where drafts influence them.
Each request is decided when it arrives; running requests are not affected.
"""

from __future__ import annotations

import logging
import random

from services.router.metrics import RouterMetrics

audit = logging.getLogger("outrider.audit")


class SpeculationSwitch:
    def __init__(self, percentage: float, metrics: RouterMetrics) -> None:
        """`percentage`: share of requests that may speculate, until `set` changes it."""
        self.percentage = percentage
        self._metrics = metrics
        metrics.speculation_percentage.set(percentage)

    def draw(self) -> bool:
        """Returns whether a new request may speculate.

        Decides at random and not in turn: if clients alternate between two kinds of requests, each group would
        otherwise get only one of them.
        """
        return 100 * random.random() < self.percentage

    def set(self, percentage: float, *, caller: str, reason: str) -> None:
        """Sets `percentage`, 0 to 100. Counts the change, and logs an audit line."""
        audit.warning(
            "audit: speculation for %g %% of requests, was %g %%; set by %s, reason: %r",
            percentage,
            self.percentage,
            caller,
            reason,
        )
        self.percentage = percentage
        self._metrics.speculation_percentage.set(percentage)
        self._metrics.speculation_switched.inc()
