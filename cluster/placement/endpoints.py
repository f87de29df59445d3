"""Addresses of a pool's workers: lists that change while the programs run. Imports no torch.

    host:port       one worker
    dns:name:port   one worker at every address (A and AAAA) of the name
    file:path       the workers in a file, one host:port a line; blank lines and text after a # are ignored; labels of
                    the worker's place may follow the address: host:port host=h2 zone=b region=r

Names and files are polled, because not every system can report their changes. If a name or file cannot be read, its
last list stays valid, because the workers probably still run.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path

from cluster.config.types import is_host_port
from cluster.config.workers import WorkerConfig
from cluster.placement.place import Endpoint

logger = logging.getLogger(__name__)

DNS_INTERVAL_S = 3.0
FILE_INTERVAL_S = 0.5
_FIRST_LOOK_S = 2.0  # maximum wait for the first lookup, so that a silent name server does not delay other sources
_WILDCARD_HOSTS = ("0.0.0.0", "[::]")

_FileState = tuple[int, int, int]


async def follow_addresses(addresses: Sequence[str]) -> AsyncIterator[Sequence[str]]:
    """Yields the lists of `follow`, without the labels."""
    async for lines in follow(addresses):
        yield list(dict.fromkeys(Endpoint.parse(line).address for line in lines))


async def follow(addresses: Sequence[str]) -> AsyncIterator[Sequence[str]]:
    """Yields the list of endpoints of `addresses`, first at the start and then after every change.

    A list has no duplicates. `Endpoint` defines the format of its lines: an address, and labels if a file gives some.
    """
    sources = [_source(address) for address in addresses]
    changed = asyncio.Event()
    watching = [asyncio.create_task(source.watch(changed)) for source in sources]
    try:
        first_looks = [asyncio.create_task(source.has_looked.wait()) for source in sources]
        if first_looks:
            _, late = await asyncio.wait(first_looks, timeout=_FIRST_LOOK_S)
            for look in late:
                look.cancel()
        known: list[str] | None = None
        while True:
            changed.clear()
            current = list(dict.fromkeys(address for source in sources for address in source.addresses))
            if current != known:
                known = current
                yield current
            await changed.wait()
    finally:
        for task in watching:
            task.cancel()


def advertised_address(worker: WorkerConfig) -> str:
    """Returns the address at which other programs reach `worker`. Raises ConfigurationError."""
    if worker.advertise is not None:
        return worker.advertise
    host, _, port = worker.listen_address.rpartition(":")
    return f"{socket.gethostname()}:{port}" if host in _WILDCARD_HOSTS else worker.listen_address


def parse_list(text: str) -> list[str]:
    """Returns the workers in the text of a file.

    Raises ValueError, naming the line, if one is not a valid `Endpoint`.
    """
    addresses = []
    for number, line in enumerate(text.splitlines(), start=1):
        worker = line.partition("#")[0].strip()
        if not worker:
            continue
        try:
            addresses.append(str(Endpoint.parse(worker)))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return addresses


async def resolve(name: str, port: str) -> list[str]:
    """Returns all addresses of `name`, sorted, because name servers rotate them. Raises OSError or UnicodeError."""
    infos = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    hosts = sorted({str(info[4][0]) for info in infos})
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]


class _Source(ABC):
    """One entry of a list of addresses."""

    def __init__(self, name: str) -> None:
        self.addresses: Sequence[str] = ()  # empty before the first lookup
        self.has_looked = asyncio.Event()
        self._name = name
        self._complaint: str | None = None

    @abstractmethod
    async def watch(self, changed: asyncio.Event) -> None:
        """Reads the source, repeatedly if it may change, and sets `changed` whenever `addresses` has changed."""

    def _take(self, addresses: Iterable[str], changed: asyncio.Event) -> None:
        if self._complaint is not None:
            logger.info("%s is readable again", self._name)
            self._complaint = None
        self.addresses = tuple(addresses)
        self.has_looked.set()
        changed.set()

    def _keep(self, complaint: str) -> None:
        """Keeps the last list, and logs the reason once."""
        if complaint != self._complaint:
            logger.warning(
                "%s: %s; the last list of %d addresses stays in use", self._name, complaint, len(self.addresses)
            )
            self._complaint = complaint
        self.has_looked.set()


class _Fixed(_Source):
    async def watch(self, changed: asyncio.Event) -> None:
        self._take([self._name], changed)


class _Name(_Source):
    async def watch(self, changed: asyncio.Event) -> None:
        _, name, port = self._name.split(":")
        while True:
            try:
                self._take(await resolve(name, port), changed)
            except (OSError, UnicodeError) as error:  # UnicodeError: not a valid name
                self._keep(f"{name} cannot be resolved ({error})")
            await asyncio.sleep(DNS_INTERVAL_S)


class _File(_Source):
    """A file of endpoints. Reads a change only when two polls agree, because a program may still write the file."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._path = Path(name.removeprefix("file:")).expanduser()

    async def watch(self, changed: asyncio.Event) -> None:
        read: _FileState | None = None
        seen: _FileState | None = None
        while True:
            try:
                state = await asyncio.to_thread(_state_of, self._path)
                if state != read and (state == seen or not self.has_looked.is_set()):
                    read = state
                    text = await asyncio.to_thread(self._path.read_text, encoding="utf-8-sig")
                    self._take(parse_list(text), changed)
                seen = state
            except (OSError, ValueError) as error:
                self._keep(error.strerror or str(error) if isinstance(error, OSError) else str(error))
                if isinstance(error, OSError):
                    read = seen = None  # when the file is back, read it even if it is unchanged
            await asyncio.sleep(FILE_INTERVAL_S)


def _state_of(path: Path) -> _FileState:
    """Returns the file's time, size and inode, which together change whenever the file is edited or replaced."""
    status = os.stat(path)
    return status.st_mtime_ns, status.st_size, status.st_ino


def _source(address: str) -> _Source:
    if is_host_port(address):
        return _Fixed(address)
    return _File(address) if address.startswith("file:") else _Name(address)
