"""Networks of a fault run, which place its programs and cut one off from the others.

With the right to create network namespaces, every program has one of its own, joined by a bridge. Cutting takes the
link down, so that nothing comes back, not even a reset. Without that right all programs are on loopback behind proxies
that can be stopped: connections stay, and nothing passes.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import subprocess
from dataclasses import dataclass, field
from typing import Protocol

from services.launch.child import Child, end_all
from services.launch.local import free_ports

_CLONE_NEWNET = 0x40000000
_PREFIX = "orf"  # of the namespaces' names
_SUBNET = "10.219.83"
_PORT = 7000
_numbers = itertools.count(2)


@dataclass(slots=True)
class Place:
    """Addresses and command prefix of one program."""

    name: str
    listen: str  # host:port
    called: str  # where others reach it
    prefix: tuple[str, ...] = ()  # of the command that runs it
    proxy: Child | None = field(default=None, repr=False)


class Network(Protocol):
    what: str

    def place(self, name: str) -> Place:
        """Returns the place of a new program."""

    def cut(self, place: Place) -> None:
        """Cuts `place` off: nothing passes to or from it any more."""

    def heal(self, place: Place) -> None: ...

    def close(self) -> None: ...


def make_network() -> Network:
    """Namespaces where the kernel lets us make them, else loopback. The caller's own sockets then are in it."""
    try:
        return Namespaces()
    except (OSError, subprocess.CalledProcessError):
        return Loopback()


class Namespaces:
    """The thread that makes it, and those it starts, are in the clients' namespace from then on."""

    what = "network namespaces"

    def __init__(self) -> None:
        self._names: list[str] = []
        self._own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            self._hub = self._new_namespace("hub")
            _ip("-n", self._hub, "link", "add", "br0", "type", "bridge")
            _ip("-n", self._hub, "link", "set", "br0", "up")
            clients = self._join("clients", f"{_SUBNET}.1")
            self._enter(os.open(f"/var/run/netns/{clients}", os.O_RDONLY))
        except BaseException:
            self.close()
            raise

    def place(self, name: str) -> Place:
        host = f"{_SUBNET}.{next(_numbers)}"
        namespace = self._join(name, host)
        address = f"{host}:{_PORT}"
        return Place(namespace, address, address, ("ip", "netns", "exec", namespace))

    def cut(self, place: Place) -> None:
        _ip("-n", self._hub, "link", "set", place.name, "down")

    def heal(self, place: Place) -> None:
        _ip("-n", self._hub, "link", "set", place.name, "up")

    def close(self) -> None:
        self._enter(self._own)
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def _new_namespace(self, name: str) -> str:
        name = f"{_PREFIX}{os.getpid() % 10_000}{name.replace(' ', '')}"[:15]  # a link's name is no longer
        _ip("netns", "add", name)
        self._names.append(name)
        _ip("-n", name, "link", "set", "lo", "up")
        return name

    def _join(self, name: str, host: str) -> str:
        """A new namespace with an address on the bridge. Its link's other end, in the hub, has its name."""
        namespace = self._new_namespace(name)
        _ip("-n", self._hub, "link", "add", namespace, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _ip("-n", self._hub, "link", "set", namespace, "master", "br0", "up")
        _ip("-n", namespace, "address", "add", f"{host}/24", "dev", "eth0")
        _ip("-n", namespace, "link", "set", "eth0", "up")
        return namespace

    @staticmethod
    def _enter(descriptor: int) -> None:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "cannot enter a network namespace")
        os.close(descriptor)


class Loopback:
    what = "loopback, behind proxies"

    def __init__(self) -> None:
        self._proxies: list[Child] = []

    def place(self, name: str) -> Place:
        listen, called = (f"127.0.0.1:{port}" for port in free_ports(2))
        arguments = ["--listen", called, "--to", listen, "--round-trip-ms", "0", "--loss", "0"]
        proxy = Child(f"proxy of {name}", arguments, module="services.launch.delay_proxy")
        proxy.start()
        self._proxies.append(proxy)
        return Place(name, listen, called, proxy=proxy)

    def cut(self, place: Place) -> None:
        assert place.proxy is not None
        os.kill(place.proxy.pid, signal.SIGSTOP)

    def heal(self, place: Place) -> None:
        assert place.proxy is not None
        os.kill(place.proxy.pid, signal.SIGCONT)

    def close(self) -> None:
        end_all(self._proxies, 5.0)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
