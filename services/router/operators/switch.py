"""Operator switch: the percentage of new requests that may speculate.

It changes no token of an answer (but with `acceptance: rejection`, where drafts have a say). A request is decided on
when it comes; those that run end as they began.
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
        """Returns True if a new request may be speculated for.

        Decides at random: with clients that take turns, each side would otherwise have requests of one kind.
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
