"""A replica's client of the registry: it announces the replica and follows the pools."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from cluster.config import Config
from cluster.owned_folder import OwnedFolder
from cluster.placement.place import Endpoint
from cluster.placement.registry import HEARTBEAT_SECONDS, Announcement, Pool, endpoints_after
from services.launch.ray.registry_actor import RegistryClient

logger = logging.getLogger("ray.serve.outrider")

FOLDERS = "outrider-ray-"
"""How the names of the folders begin that replicas keep their lists of addresses in."""

_PAUSE_SECONDS = 0.5  # pause after the registry could not be asked
_LEAVE_SECONDS = 5.0  # afterwards the entry expires in the registry


class Announcer:
    """Sends the result of `describe`, unless it is None, to the registry every heartbeat until `has_ended`."""

    def __init__(
        self,
        application: str,
        config: Config,
        describe: Callable[[], Announcement | None],
        has_ended: Callable[[], bool],
    ) -> None:
        self.is_fenced = False  # a newer program of this replica, or at its address, has registered
        self._registry = RegistryClient(application, config)
        self._describe = describe
        self._has_ended = has_ended
        self._listed: Announcement | None = None
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="announcer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def leave(self) -> None:
        """Takes the replica off the lists."""
        self._leaving.set()
        self._thread.join(_LEAVE_SECONDS)

    def _run(self) -> None:
        while not self._leaving.is_set() and not self._has_ended():
            self._announce()
            self._leaving.wait(HEARTBEAT_SECONDS)
        if self._listed is not None:
            self._registry.withdraw(self._listed.address, self._listed.epoch)

    def _announce(self) -> None:
        announcement = self._describe()
        if announcement is None:
            return
        is_listed = self._registry.announce(announcement)
        if is_listed is False and not self.is_fenced:
            logger.error("%s is fenced off: a newer program has its place", announcement.address)
        if is_listed is not None:
            self.is_fenced = not is_listed
        self._listed = announcement


class Follower:
    """Writes a file with a pool's workers and their places, for a program that follows `file:` addresses."""

    def __init__(self, application: str, config: Config, pool: Pool, folder: OwnedFolder) -> None:
        self._registry = RegistryClient(application, config)
        self._pool = pool
        self._folder = folder
        self._endpoints: tuple[Endpoint, ...] = ()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"follower of {pool}", daemon=True)

    def start(self) -> Path:
        """Returns the file, which is empty at first."""
        path = self._write()
        self._thread.start()
        return path

    def stop(self) -> None:
        """Stops writing; a call that waits for changes ends by itself."""
        self._stopping.set()

    def _run(self) -> None:
        stamp: tuple[int, int] | None = None
        while not self._stopping.is_set():
            view = self._registry.changed_view(self._pool, stamp)
            if view is None:
                self._stopping.wait(_PAUSE_SECONDS)
                continue
            stamp = view.stamp
            endpoints = endpoints_after(self._endpoints, view)
            if endpoints != self._endpoints and not self._stopping.is_set():
                self._endpoints = endpoints
                self._write()
                listed = ", ".join(endpoint.address for endpoint in endpoints)
                logger.info("%s workers now: %s", self._pool, listed or "none")

    def _write(self) -> Path:
        return self._folder.replace(f"{self._pool}s", "".join(f"{endpoint}\n" for endpoint in self._endpoints))
