"""Draft workers of one target, only for it and on its host: in the further bundles of its placement group."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import yaml
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.config import Config
from cluster.owned_folder import OwnedFolder
from services.launch.ray.membership import FOLDERS
from services.launch.ray.options import host_cpu_threads, sidecar_options
from services.launch.ray.ports import free_address, listening_at
from services.launch.ray.program import Program, python_path

logger = logging.getLogger("ray.serve.outrider")

_END_SECONDS = 5.0  # in addition to the time that a program may drain
_PAUSE_SECONDS = (1.0, 5.0, 20.0, 60.0)  # pause before an ended program is restarted
_LONG_SECONDS = 60.0  # a program that ran this long did not fail at its start


class SidecarActor:
    """Keeps a draft program running. Ray makes an actor of it; a lost one is replaced at the same address."""

    def __init__(self, tree: dict[str, Any], address: str) -> None:
        self._config = Config.model_validate(tree)
        self._address = address
        self._folder = OwnedFolder(FOLDERS)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sidecar", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops the program. Returns when it has drained."""
        self._stopping.set()
        self._thread.join()
        self._folder.remove()

    def _run(self) -> None:
        num_ends = 0
        while not self._stopping.is_set():
            program = Program("draft", ["draft", "--config", str(self._write())], {"PYTHONPATH": python_path()})
            program.start()
            seconds = 0
            while program.end() is None and not self._stopping.wait(1.0):
                seconds += 1
            if self._stopping.is_set():
                program.stop(self._config.draft.drain_seconds + _END_SECONDS)
                return
            num_ends = 0 if seconds >= _LONG_SECONDS else num_ends + 1
            pause = _PAUSE_SECONDS[min(num_ends, len(_PAUSE_SECONDS) - 1)]
            logger.error("%s; restarting it in %.0f s", program.end(), pause)
            self._stopping.wait(pause)

    def _write(self) -> Path:
        """Writes the configuration, with ports that are free now. Returns its path."""
        settings = listening_at(self._config.draft, self._address)
        if self._config.drafts_on_host_cpu:
            # Ray does not pin processes, and the default is a thread per core of the node.
            settings |= {"threads": host_cpu_threads(self._config)}
        draft = self._config.draft.model_copy(update=settings)
        tree = self._config.model_copy(update={"draft": draft}).model_dump(mode="json")
        return self._folder.replace("cluster.yaml", yaml.safe_dump(tree))


class Sidecars:
    """Draft workers next to the replica that starts them; the replica continues if they are lost."""

    def __init__(self, config: Config) -> None:
        group = ray.util.get_current_placement_group()
        assert group is not None, "a replica with sidecars has a placement group"
        self.addresses: Sequence[str] = [free_address() for _ in range(config.draft.replicas)]
        self._seconds = config.draft.drain_seconds + 2 * _END_SECONDS
        options = sidecar_options(config)
        actor, tree = ray.remote(SidecarActor), config.model_dump(mode="json")
        self._actors = [
            actor.options(
                **options,
                max_restarts=-1,
                max_concurrency=2,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            ).remote(tree, address)
            for index, address in enumerate(self.addresses, start=1)
        ]

    def stop(self) -> None:
        try:
            ray.get([actor.stop.remote() for actor in self._actors], timeout=self._seconds)
        except ray.exceptions.RayError as error:
            logger.warning("a sidecar had to be killed (%s)", type(error).__name__)
        for actor in self._actors:
            ray.kill(actor)
