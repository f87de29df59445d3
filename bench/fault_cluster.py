"""A cluster whose programs are started one by one, as by hand: two routers, two targets, two drafts."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx
import yaml

from bench.fault_network import Network, Place
from cluster.config import Config
from services.launch.child import Child, end_all

Kind = Literal["target", "draft", "router"]
KINDS: tuple[Kind, ...] = ("target", "draft", "router")
READY_SECONDS = 600.0
_END_SECONDS = 60.0
_POLL_SECONDS = 0.05


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
