"""Limits of a server's connections: their number in total and per address."""

from __future__ import annotations

import ipaddress
import logging
import resource
from collections import Counter

from cluster.config.router import RouterConfig
from services.router.metrics import RouterMetrics

logger = logging.getLogger(__name__)

_OTHER_FILES = 256  # other open files of a router: channels to targets, its log, ...


class Connections:
    """Counts the open connections of one server, and refuses those beyond the limits of `config`."""

    def __init__(self, config: RouterConfig, metrics: RouterMetrics) -> None:
        self.config = config
        self._metrics = metrics
        self._limit = config.max_connections
        self._limit_per_address = max(1, self._limit // 2)
        self._num_of: Counter[str] = Counter()
        self._num_open = 0

    def enter(self, host: str) -> bool:
        """Counts a connection from `host` until `leave`. Returns False if a limit is reached."""
        key = _network(host)
        if self._num_open >= self._limit:
            self.count_closed("full")
            return False
        if self._num_of[key] >= self._limit_per_address:
            self.count_closed("address_full")
            return False
        self._num_open += 1
        self._num_of[key] += 1
        self._metrics.connections.inc()
        return True

    def leave(self, host: str) -> None:
        key = _network(host)
        self._num_open -= 1
        self._num_of[key] -= 1
        if not self._num_of[key]:
            del self._num_of[key]
        self._metrics.connections.dec()

    def count_closed(self, reason: str) -> None:
        """Counts a connection that is closed because of its client's behaviour."""
        self._metrics.count_closed_connection(reason)


def _network(host: str) -> str:
    """Returns the unit of the limit per address: an IPv4 address or IPv6 /64 network."""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return address.exploded[:19]


def allow_open_files(num_connections: int) -> None:
    """Raises the process's limit of open files for `num_connections`, at most to the hard limit.

    Logs a warning if that is too low.
    """
    needed = num_connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        logger.warning(
            "router.max_connections=%d needs %d open files and the limit is %d: lower the setting, or raise the "
            "limit (ulimit -n)",
            num_connections,
            needed,
            allowed,
        )
