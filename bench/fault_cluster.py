"""A cluster whose programs are started one by one, as by hand, in a network that can cut one off from the others.

It has two routers, two targets and two drafts. With the right to create network namespaces, every program has one of
its own, joined by a bridge. Cutting takes the link down, so that nothing comes back, not even a reset. Without that
right all programs are on loopback behind proxies that can be stopped: connections stay, and nothing passes.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import httpx
import yaml

from cluster.config import Config
from services.launch.child import Child, end_all
from services.launch.local import free_ports

Kind = Literal["target", "draft", "router"]
KINDS: tuple[Kind, ...] = ("target", "draft", "router")
READY_SECONDS = 600.0
_END_SECONDS = 60.0
_POLL_SECONDS = 0.05
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


@dataclass(slots=True)
class Program:
    kind: Kind
    place: Place
    child: Child

    @property
    def url(self) -> str:
        """URL of the program, if it is a router."""
        return f"http://{self.place.called}"

    def signal(self, signum: signal.Signals) -> None:
        os.kill(self.child.pid, signum)

    def drain(self) -> int:
        """Asks it to end and waits for that; returns its exit code."""
        self.child.terminate()
        deadline = time.monotonic() + _END_SECONDS
        while (code := self.child.exit_code) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.child.name} does not end")
            time.sleep(_POLL_SECONDS)
        return code


class FaultCluster:
    """Runs while entered."""

    def __init__(self, config: Config, network: Network, replicas: int = 2) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="outrider-faults-")
        self.network = network
        places = {kind: [network.place(f"{kind} {index}") for index in range(replicas)] for kind in KINDS}
        self._replicas = replicas
        called = {kind: tuple(place.called for place in places[kind]) for kind in KINDS}
        config = config.model_copy(
            update={
                "target": config.target.model_copy(update={"addresses": called["target"]}),
                "draft": config.draft.model_copy(update={"addresses": called["draft"]}),
            }
        )
        file = Path(self._folder.name) / "cluster.yaml"
        file.write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
        self.programs = {
            kind: [Program(kind, place, _child(kind, place, file)) for place in places[kind]] for kind in KINDS
        }

    @property
    def urls(self) -> Sequence[str]:
        """URLs of the routers."""
        return [router.url for router in self.programs["router"]]

    def __enter__(self) -> FaultCluster:
        for program in self._all:
            program.child.start()
        self.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        for program in self._all:
            self.network.heal(program.place)
            program.child.terminate()
        end_all([program.child for program in self._all], 10.0)
        self._folder.cleanup()

    def wait_ready(self) -> None:
        """Until every router can use every target, and these have all their links."""
        deadline = time.monotonic() + READY_SECONDS
        for url in self.urls:
            while not self._is_ready(url):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the router at {url} is not ready")
                time.sleep(_POLL_SECONDS)

    @property
    def _all(self) -> list[Program]:
        return [program for kind in KINDS for program in self.programs[kind]]

    def _is_ready(self, url: str) -> bool:
        try:
            response = httpx.get(f"{url}/health", timeout=2.0)
        except httpx.HTTPError:
            return False
        targets = response.json().get("targets", [])
        return len(targets) == self._replicas and all(
            target["problem"] is None and target["num_draft_links"] == self._replicas for target in targets
        )


def _child(kind: Kind, place: Place, config_file: Path) -> Child:
    arguments = [kind, "--config", str(config_file)]
    if kind == "router":
        host, port = place.listen.rsplit(":", 1)
        arguments += ["--set", f"router.host={host}", "--set", f"router.port={port}"]
    else:
        arguments += ["--set", f"{kind}.addresses=[{place.listen!r}]"]
    return Child(place.name, arguments, prefix=place.prefix)
