"""A cluster with vLLM targets, its programs started one by one: which drafts they use is what a file says."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from services.launch.child import Child
from services.launch.local import free_ports
from tests.waiting import eventually

READY_S = 900.0  # below the time limit of a test, which would not report what is missing
_PAUSE_S = 0.2
# Engines get one thread and no core of their own. Next to other work, threads that wait for each other in every layer
# take many times longer than one thread. One test here and Ray's tests cover how a target divides its cores.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "KMP_AFFINITY": "none"}
_TOLD = (
    "outrider_draft_s",
    "outrider_link_bytes",
    "outrider_proposals",
    "outrider_sequences",
    "outrider_late",
)  # metrics


class Programs:
    """A router, targets and drafts. Ended with `stop`."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self._folder = folder
        self._settings = {"target.dtype": "float32", "draft.dtype": "float32"} | settings
        self.targets: dict[str, Child] = {}
        self.drafts: dict[str, Child] = {}
        self.draft_addresses: dict[str, str] = {}
        self._ports: dict[str, int] = {}  # ports of targets by name
        self._metrics_ports: dict[str, int] = {}
        (self._port,) = free_ports(1)
        self._write("targets")
        self._write("drafts")
        self.router = self._start("router", "router", **{"router.port": self._port})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start_target(self, name: str, **settings: object) -> None:
        port, metrics_port = free_ports(2)
        self._ports[name], self._metrics_ports[name] = port, metrics_port
        more = {"target.listen": f"127.0.0.1:{port}", "target.metrics_port": metrics_port}
        self.targets[name] = self._start(name, "target", **more, **settings)
        self._write("targets", *self._lines("targets"), f"127.0.0.1:{port}")

    def start_draft(self, name: str, **settings: object) -> None:
        """Its address is in nobody's list before `use`."""
        port, metrics_port = free_ports(2)
        self._metrics_ports[name] = metrics_port
        self.draft_addresses[name] = f"127.0.0.1:{port}"
        more = {"draft.listen": f"127.0.0.1:{port}", "draft.metrics_port": metrics_port}
        self.drafts[name] = self._start(name, "draft", **more, **settings)

    def use(self, *drafts: str, wait: bool = True) -> None:
        """Makes the targets use only these draft workers."""
        self._write("drafts", *(self.draft_addresses[name] for name in drafts))
        if wait:
            addresses = {self.draft_addresses[name] for name in drafts}
            expected = [len(drafts)] * len(self.targets)
            assert eventually(lambda: self.links() == expected, READY_S, _PAUSE_S), self.state()
            assert eventually(
                lambda: all(self._drafts_of(name) == addresses for name in self.targets), READY_S, _PAUSE_S
            )

    def links(self) -> list[int]:
        """How many are up, of each target that answers, when all that are listed are up."""
        targets = self.health().get("targets", [])
        return [
            target["num_draft_links"]
            for target in targets
            if target["problem"] is None and target["num_draft_links"] == target["num_draft_links_configured"]
        ]

    def num_running(self) -> list[int]:
        """Returns the number of running requests of each target, as the router reports it."""
        return [target.get("running", 0) for target in self.health().get("targets", [])]

    def wait_ready(self) -> None:
        assert eventually(lambda: len(self.links()) == len(self.targets), READY_S, _PAUSE_S), self.state()

    def health(self) -> dict[str, Any]:
        with contextlib.suppress(httpx.TransportError):
            body: dict[str, Any] = httpx.get(f"{self.url}/health", timeout=5).json()
            return body
        return {}

    def state(self) -> str:
        """Returns what the router reports, the exit codes of programs that have ended, and what the others counted."""
        children = [self.router, *self.targets.values(), *self.drafts.values()]
        ended = {child.name: child.exit_code for child in children if child.has_ended()}
        counters = {}
        for name in {*self.targets, *self.drafts} - ended.keys():
            with contextlib.suppress(httpx.TransportError):
                counters[name] = {key: value for key, value in self.counters(name).items() if key.startswith(_TOLD)}
        return f"ended: {ended}, health: {self.health()}, counters: {counters}"

    def counters(self, name: str) -> dict[str, float]:
        """All metrics of a worker, by name and labels as they stand on its page."""
        page = httpx.get(f"http://127.0.0.1:{self._metrics_ports[name]}/metrics", timeout=10).text
        lines = (line for line in page.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def _drafts_of(self, name: str) -> set[str]:
        """The addresses of the draft workers that a target has links to, as its last report says."""
        links = [key for key in self.counters(name) if key.startswith("outrider_link_bytes_total{")]
        return {key.split('draft="')[1].split('"')[0] for key in links}

    def assert_nothing_in_use(self) -> None:
        for name in [*self.targets, *self.drafts]:
            assert eventually(lambda name=name: self.counters(name)["outrider_kv_blocks_used"] == 0), name
        for name in self.drafts:
            assert eventually(lambda name=name: self.counters(name)["outrider_draft_sequences"] == 0), name

    def restart(self, name: str) -> None:
        """Restarts a target or draft worker at the same address. Kills it first if it still runs."""
        child = self.targets.get(name) or self.drafts[name]
        child.kill()
        child.start()

    def remove_target(self, name: str) -> None:
        """Stops a target, if it still runs, and removes its address from the list."""
        self.targets.pop(name).kill()
        del self._metrics_ports[name]
        self._write("targets", *(f"127.0.0.1:{self._ports[name]}" for name in self.targets))

    def stop(self) -> None:
        children = [self.router, *self.targets.values(), *self.drafts.values()]
        for child in children:
            child.terminate()
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGINT)  # the second signal: nothing is to be finished
        deadline = time.monotonic() + 20
        while not all(child.has_ended() for child in children) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
        for child in children:
            child.kill()

    def _start(self, name: str, program: str, **settings: object) -> Child:
        given = {
            **self._settings,
            "target.addresses": f"['file:{self._folder / 'targets'}']",
            "draft.addresses": f"['file:{self._folder / 'drafts'}']",
            **settings,
        }
        options = [part for key, value in given.items() for part in ("--set", f"{key}={value}")]
        child = Child(name, [program, *options], environment=ONE_THREAD if program == "target" else None)
        child.start()
        return child

    def _lines(self, file: str) -> list[str]:
        return (self._folder / file).read_text().split()

    def _write(self, file: str, *addresses: str) -> None:
        """At once as a whole, as its readers look at any time."""
        new = self._folder / f"{file}.new"
        new.write_text("\n".join(addresses))
        new.replace(self._folder / file)


@contextlib.contextmanager
def two_targets(folder: Path, random_draft: Path, **settings: object) -> Iterator[Programs]:
    """Two targets, and two drafts that none uses yet: `right`, and `random` with the model `random_draft`."""
    programs = Programs(folder, **settings)
    try:
        programs.start_target("first")
        programs.start_target("second")
        programs.start_draft("right")
        programs.start_draft("random", **{"draft.model": random_draft})
        programs.wait_ready()
        yield programs
    finally:
        programs.stop()
