"""The actor that Serve runs: it starts one program and reports its health. No data goes through it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import fields
from typing import Any

import ray
import yaml
from ray import serve

from cluster.config import Config
from cluster.errors import ConfigurationError
from cluster.owned_folder import OwnedFolder
from cluster.placement.place import Place
from cluster.placement.registry import Announcement, NodeLabels, Pool
from services.launch.local import free_ports
from services.launch.ray.membership import FOLDERS, Announcer, Follower
from services.launch.ray.options import config_of_deployment, pool_of
from services.launch.ray.ports import free_address, host_port, is_free, listening_at
from services.launch.ray.probe import Probe, RouterProbe, WorkerProbe
from services.launch.ray.program import Program, python_path
from services.launch.ray.registry_actor import find_view
from services.launch.ray.sidecar import Sidecars

_END_SECONDS = 5.0  # in addition to the time that a program may drain
_PORT_SECONDS = 10.0  # time for the previous owner of the router's port to release it, after it left the registry
_POLL_SECONDS = 0.1
_KNOWN_SECONDS = 10.0  # time for a router to find targets, if there are any
_HEARD_SECONDS = 2.5  # routers check their lists twice a second, read a list that was unchanged twice, then poll
_ACCELERATOR_LABEL = "ray.io/accelerator-type"
_HOST_LABEL = "ray.io/node-id"
_ZONE_LABEL = "ray.io/availability-zone"
_REGION_LABEL = "ray.io/availability-region"
_CALLED: dict[Pool, Pool | None] = {"router": "target", "target": "draft", "draft": None}


class ProgramReplica:
    """The actor of one program, which is ready when the program serves.

    Serve considers it healthy while `check_health` does not raise, and calls `__del__` to end it. That drains the
    program, whose requests Serve does not see.
    """

    async def __init__(self, deployment: str, tree: dict[str, Any], *_: object) -> None:  # type: ignore[misc]  # Serve awaits it
        """`tree`: the configuration. Further arguments are handles of other deployments, on which this one depends."""
        self._shared_config = Config.model_validate(tree)
        self._config = config_of_deployment(self._shared_config, deployment)
        self._pool = pool_of(deployment)
        self._ending = contextlib.ExitStack()
        try:
            await self._begin()
        except BaseException:
            await asyncio.to_thread(self._ending.close)
            raise

    async def _begin(self) -> None:
        context = serve.get_replica_context()
        folder = OwnedFolder(FOLDERS)
        self._ending.callback(folder.remove)
        settings: dict[str, Any] = {}
        if self._pool == "target" and self._config.has_sidecars:
            sidecars = Sidecars(self._config)
            self._ending.callback(sidecars.stop)
            settings["draft"] = {"addresses": tuple(sidecars.addresses)}
        elif (called := _CALLED[self._pool]) is not None:
            follower = Follower(context.app_name, self._config, called, folder)
            self._ending.callback(follower.stop)
            settings[called] = {"addresses": (f"file:{follower.start()}",)}
        self._address, own_settings = await self._choose_address()
        settings[self._pool] = own_settings
        self._labels = self._node_labels()
        settings["placement"] = self._place()
        self._probe: Probe = (
            RouterProbe(self._address, self._config.router)
            if self._pool == "router"
            else WorkerProbe(self._pool, self._address, self._config)
        )
        self._program = Program(
            self._pool,
            [self._pool, "--config", str(folder.replace("cluster.yaml", self._tree_with(settings)))],
            {"PYTHONPATH": python_path()},
        )
        await asyncio.to_thread(self._program.start)
        drain_seconds: float = getattr(self._config, self._pool).drain_seconds
        self._ending.callback(self._program.stop, drain_seconds + _END_SECONDS)
        while await asyncio.to_thread(self._find_problem) is not None:
            if (end := self._program.end()) is not None:
                raise RuntimeError(end)
            await asyncio.sleep(_POLL_SECONDS)
        self._replica = context.replica_tag
        self._announcer = Announcer(context.app_name, self._shared_config, self._describe, self._has_ended)
        self._announcer.start()
        self._ending.callback(self._announcer.leave)
        await self._become_known()

    async def _become_known(self) -> None:
        """Waits until callers have this replica's address, because a rolling update ends the next replica then."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KNOWN_SECONDS):
                while not await asyncio.to_thread(self._probe.is_joined):  # noqa: ASYNC110  # another process
                    await asyncio.sleep(_POLL_SECONDS)
        if self._pool == "target":
            await asyncio.sleep(_HEARD_SECONDS)

    async def check_health(self) -> None:
        """Raises RuntimeError with the reason, in a line."""
        if (problem := await asyncio.to_thread(self._find_problem)) is not None:
            raise RuntimeError(problem)
        if self._announcer.is_fenced:
            raise RuntimeError(f"the {self._pool} at {self._address} is fenced off: a newer program has its place")

    def __del__(self) -> None:
        if hasattr(self, "_ending"):
            self._ending.close()

    def _find_problem(self) -> str | None:
        if (end := self._program.end()) is not None:
            return end
        problem = self._probe.problem()
        if problem is None:
            return None
        complaint = self._program.complaint
        return f"the {self._pool}: {problem}" + (f"; its last error: {complaint}" if complaint else "")

    def _has_ended(self) -> bool:
        return self._program.end() is not None

    def _describe(self) -> Announcement | None:
        """Returns the announcement for the registry; None if the program does not answer."""
        if self._find_problem() is not None:
            return None
        facts = self._probe.facts()
        return Announcement(
            self._replica,
            self._pool,
            self._address,
            self._program.epoch,
            self._labels,
            facts.fingerprint,
            facts.load,
        )

    async def _choose_address(self) -> tuple[str, dict[str, Any]]:
        """Returns the address for other programs, and the settings that make the program listen there."""
        if self._pool != "router":
            address = free_address()
            worker = self._config.target if self._pool == "target" else self._config.draft
            return address, listening_at(worker, address)
        host, port = self._config.router.host, self._config.router.port
        if port == 0:
            port = free_ports(1, host)[0]
        address = host_port(ray.util.get_node_ip_address() if host in ("0.0.0.0", "::") else host, port)
        if port == self._config.router.port:
            await self._wait_for_port(host, port, address)
        return address, {"port": port}

    async def _wait_for_port(self, host: str, port: int, address: str) -> None:
        """Waits while the replaced router still has the port."""
        application = serve.get_replica_context().app_name
        deadline = time.monotonic() + _PORT_SECONDS
        while not is_free(host, port):
            view = await asyncio.to_thread(find_view, application, "router")
            if view is not None and address in [member.address for member in view.members]:
                deadline = time.monotonic() + _PORT_SECONDS
            if time.monotonic() > deadline:
                raise ConfigurationError(
                    f"cannot listen on {host}:{port} on this node, the port is in use: set router.port to another, "
                    "or 0 for a free one"
                )
            await asyncio.sleep(_POLL_SECONDS)

    def _node_labels(self) -> NodeLabels:
        labels: dict[str, str] = ray.get_runtime_context().get_node_labels()
        return NodeLabels(
            labels.get(_HOST_LABEL),
            labels.get(_ZONE_LABEL),
            labels.get(_REGION_LABEL),
            labels.get(_ACCELERATOR_LABEL),
        )

    def _place(self) -> dict[str, Any]:
        """Returns the settings of the program's place; missing labels leave the configuration unchanged."""
        labels = {field.name: getattr(self._labels, field.name) for field in fields(Place)}
        return {name: label for name, label in labels.items() if label is not None}

    def _tree_with(self, settings: dict[str, dict[str, Any]]) -> str:
        sections = {name: getattr(self._config, name).model_copy(update=update) for name, update in settings.items()}
        return yaml.safe_dump(self._config.model_copy(update=sections).model_dump(mode="json"))
