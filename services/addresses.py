"""Checks that addresses can be listened at and names resolve, before a model is loaded for minutes."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator, Sequence

from cluster.config.types import is_host_port
from cluster.config.workers import WorkerConfig
from cluster.errors import cannot_listen

logger = logging.getLogger(__name__)


def check_worker(worker: WorkerConfig, pool: str) -> None:
    """Raises ConfigurationError if a worker of `pool` could not listen at one of its addresses."""
    listened = "listen" if worker.listen is not None else "addresses"
    check_can_listen(*split(worker.listen_address), f"set {pool}.{listened}")
    if worker.health_listen is not None:
        check_can_listen(*split(worker.health_listen), f"set {pool}.health_listen")
    check_metrics_page(worker, pool)


def check_metrics_page(worker: WorkerConfig, pool: str) -> None:
    """Raises ConfigurationError if the worker has a metrics page that could not listen."""
    if worker.metrics_port is not None:
        remedy = f"set {pool}.metrics_port, or {pool}.metrics_host"
        check_can_listen(worker.metrics_host, worker.metrics_port, remedy)


def check_can_listen(host: str, port: int, remedy: str) -> int:
    """Returns a port that is free; for port 0 any free one. Raises ConfigurationError that ends with `remedy`."""
    try:
        if port > 65535:  # getaddrinfo would truncate it to 16 bits
            raise OverflowError("a port is at most 65535")
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do, to reuse recent ports
            probe.bind(address)
            probe.listen(1)  # two sockets may bind it, but only one may listen
            return int(probe.getsockname()[1])
    except (OSError, OverflowError, UnicodeError) as error:
        raise cannot_listen(_joined(host, port), error, remedy) from error


def unknown_hosts(addresses: Sequence[str]) -> Iterator[str]:
    """Yields complaints about `addresses` whose host has no address on this machine. May take seconds."""
    for address in addresses:
        name = address.removeprefix("dns:")
        if not is_host_port(name):
            continue  # the address is a file
        host, port = split(name)
        try:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, OverflowError, UnicodeError) as error:
            yield f"{address}: {getattr(error, 'strerror', None) or error}"


def warn_of_unknown_hosts(addresses: Sequence[str], setting: str) -> None:
    """Logs hosts that cannot be found, in a thread, because name servers may be slow. A name may be added later."""

    def look() -> None:
        for complaint in unknown_hosts([address for address in addresses if is_host_port(address)]):
            logger.warning("%s has a host that cannot be resolved: %s", setting, complaint)

    threading.Thread(target=look, name="addresses", daemon=True).start()


def split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
