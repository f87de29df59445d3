"""The lever of whoever is on call: speculation for all requests, for none, or for a share of them.

It changes no token of an answer. A request is decided on when it comes; those that run end as they began.
"""

from __future__ import annotations

import logging

from cluster.telemetry.metrics import RouterMetrics

audit = logging.getLogger("outrider.audit")


class SpeculationSwitch:
    def __init__(self, percentage: float, metrics: RouterMetrics) -> None:
        """`percentage` of requests are speculated for, until it is set."""
        self.percentage = percentage
        self._metrics = metrics
        self._owed = 0.0  # percents of a request that may be speculated for
        metrics.speculation_percentage.set(percentage)

    def draw(self) -> bool:
        """Whether the request that has just come may be speculated for: `percentage` of every hundred, evenly."""
        self._owed += self.percentage
        if self._owed < 100:
            return False
        self._owed -= 100
        return True

    def set(self, percentage: float, *, caller: str, reason: str) -> None:
        """`percentage` is 0 to 100. Counts, and leaves an audit line."""
        audit.warning(
            "speculation for %g %% of requests, was %g %%; set by %s, reason: %r",
            percentage,
            self.percentage,
            caller,
            reason,
        )
        self.percentage, self._owed = percentage, 0.0
        self._metrics.speculation_percentage.set(percentage)
        self._metrics.speculation_switched.inc()
