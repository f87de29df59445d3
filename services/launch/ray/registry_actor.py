"""The registry as a named actor: replicas create it if it is missing, and it ends when unused."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Sequence
from typing import Any

import ray

from cluster.config import Config
from cluster.placement.registry import Announcement, Pool, Registry, View
from cluster.placement.scaling import Decision
from services.launch.ray.scaling import Autoscaler

logger = logging.getLogger("ray.serve.outrider")

_LONG_POLL_SECONDS = 10.0
_CALL_SECONDS = 3.0
# Like Serve's controller: other nodes come and go.
_ON_THE_HEAD = "node:__internal_head__"
_NAMESPACE = "outrider"
_TICK_SECONDS = 0.5
_UNUSED_SECONDS = 30.0  # idle time after which it ends: its application has ended


class RegistryActor:
    """A `Registry` that ticks, and the autoscaler, which sees all workers there.

    Ray makes an actor of it; its calls run in one event loop.
    """

    def __init__(self, application: str) -> None:
        self._registry = Registry(secrets.randbits(62), time.monotonic())
        self._autoscaler = Autoscaler(application)
        self._configured_by = 0  # epoch of a worker
        self._scaling: asyncio.Task[None] | None = None
        self._told_version = self._registry.version
        self._changed = asyncio.Event()  # replaced on every change
        self._heard_at = time.monotonic()
        self._ticking = asyncio.get_event_loop().create_task(self._tick())

    async def announce(self, announcement: Announcement, config: Config) -> bool:
        """Announces a worker. `config`: the worker's; that of the worker that started last is the newest."""
        if announcement.epoch >= self._configured_by:
            self._configured_by = announcement.epoch
            self._autoscaler.configure(config)
        self._heard_at = time.monotonic()
        is_listed = self._registry.announce(announcement, self._heard_at)
        self._tell()
        return is_listed

    async def withdraw(self, address: str, epoch: int) -> None:
        self._registry.withdraw(address, epoch, time.monotonic())
        self._tell()

    async def view(self, pool: Pool) -> View:
        return self._registry.view(pool)

    async def decisions(self) -> Sequence[Decision]:
        """Returns the autoscaler's last decisions."""
        return self._autoscaler.decisions

    async def changed_view(self, pool: Pool, stamp: tuple[int, int] | None) -> View:
        """Returns the view as soon as it differs from the caller's, or after a while."""
        if self._registry.view(pool).stamp == stamp:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _LONG_POLL_SECONDS)
        return self._registry.view(pool)

    def _tell(self) -> None:
        if self._registry.version != self._told_version:
            self._told_version = self._registry.version
            self._changed.set()
            self._changed = asyncio.Event()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            self._registry.tick(time.monotonic())
            self._tell()
            if self._scaling is None or self._scaling.done():  # otherwise Serve's controller has not answered yet
                self._scaling = asyncio.get_event_loop().create_task(self._scale())
            if self._registry.is_empty and time.monotonic() - self._heard_at > _UNUSED_SECONDS:
                ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    async def _scale(self) -> None:
        targets, drafts = self._registry.view("target"), self._registry.view("draft")
        try:
            if targets.is_settled:
                await self._autoscaler.look(targets.members, drafts.members, time.monotonic())
        except Exception:
            logger.exception("the autoscaler failed")


class RegistryClient:
    """Calls the registry of an application on any node. Any thread may call, one at a time."""

    def __init__(self, application: str, config: Config) -> None:
        self._application = application
        self._config = config
        self._actor: Any = None
        self._problem: str | None = None

    def announce(self, announcement: Announcement) -> bool | None:
        """Returns the registry's result; None if it does not answer now."""
        answer: bool | None = self._ask(_CALL_SECONDS, "announce", announcement, self._config)
        return answer

    def withdraw(self, address: str, epoch: int) -> None:
        self._ask(_CALL_SECONDS, "withdraw", address, epoch)

    def changed_view(self, pool: Pool, stamp: tuple[int, int] | None) -> View | None:
        """Returns the registry's result; None if it does not answer now."""
        answer: View | None = self._ask(_LONG_POLL_SECONDS + _CALL_SECONDS, "changed_view", pool, stamp)
        return answer

    def _ask(self, patience: float, method: str, *arguments: object) -> Any:
        try:
            if self._actor is None:
                self._actor = _get_or_make(self._application)
            answer = ray.get(getattr(self._actor, method).remote(*arguments), timeout=patience)
        except (ray.exceptions.RayError, ValueError) as error:
            if not isinstance(error, ray.exceptions.GetTimeoutError):
                self._actor = None  # the name resolves to the next registry
            self._complain(f"{type(error).__name__}")
            return None
        self._complain(None)
        return answer

    def _complain(self, problem: str | None) -> None:
        if problem != self._problem:
            logger.warning("the registry %s", f"does not answer ({problem})" if problem else "answers again")
            self._problem = problem


def find_view(application: str, pool: Pool) -> View | None:
    """Returns the registry's view; None if no registry answers."""
    view: View | None = _ask(application, "view", pool)
    return view


def find_decisions(application: str) -> Sequence[Decision]:
    """Returns the autoscaler's last decisions; none if no registry answers."""
    return _ask(application, "decisions") or ()


def _ask(application: str, method: str, *arguments: object) -> Any:
    try:
        actor = ray.get_actor(_name(application), namespace=_NAMESPACE)
        return ray.get(getattr(actor, method).remote(*arguments), timeout=_CALL_SECONDS)
    except (ray.exceptions.RayError, ValueError):
        return None


def end_registry(application: str) -> None:
    """Ends the registry, if there is one. Replicas that still announce create another."""
    with contextlib.suppress(ray.exceptions.RayError, ValueError):
        ray.kill(ray.get_actor(_name(application), namespace=_NAMESPACE), no_restart=True)


def _name(application: str) -> str:
    return f"registry of {application}"


def _get_or_make(application: str) -> Any:
    options = {
        "name": _name(application),
        "namespace": _NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "num_cpus": 0,
        "resources": {_ON_THE_HEAD: 0.001},
        "scheduling_strategy": "DEFAULT",  # outside of the placement group of the replica that creates it
    }
    return ray.remote(RegistryActor).options(**options).remote(application)
