"""The LoRA adapters of a vLLM target: their names, and the requests that use them.

vLLM identifies an adapter by a number and a folder, and this module uses new ones for each loaded adapter. So if a name
gets another adapter, vLLM does not reuse the KV of the previous one.
"""

from __future__ import annotations

import itertools
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path

from vllm.lora.request import LoRARequest

from cluster.config.workers import TargetConfig
from cluster.errors import ConfigurationError, InvalidRequestError, NotFoundError
from cluster.owned_folder import OwnedFolder
from cluster.targets.base import no_adapter
from cluster.vllm.target.adapter_folder import AdapterFiles, BaseModel, copy_adapter, folder_within
from cluster.vllm.target.lora import LoraLimits


@dataclass(slots=True, eq=False)
class Adapter:
    """A loaded adapter. It has its name until another adapter replaces it or it is unloaded."""

    name: str
    number: int  # vLLM's ID of the adapter
    folder: Path  # our copy, which vLLM reads
    fingerprint: str
    num_running: int = 0
    is_retired: bool = False  # no name refers to it any more

    def request(self) -> LoRARequest:
        return LoRARequest(f"{self.number}:{self.name}", self.number, str(self.folder))

    def discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class Adapters:
    """All adapters of a target. Thread-safe."""

    def __init__(self, target: TargetConfig, base: BaseModel, limits: LoraLimits) -> None:
        self._root = None if target.lora_root is None else Path(target.lora_root)
        self._base = base
        self._limits = limits
        self._copies = OwnedFolder("outrider-adapters-")
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._named: dict[str, Adapter] = {}
        self._in_engine: set[Adapter] = set()  # named adapters, and adapters of running requests

    @property
    def fingerprints(self) -> dict[str, str]:
        with self._lock:
            return {name: adapter.fingerprint for name, adapter in self._named.items()}

    def named(self, name: str) -> Adapter | None:
        with self._lock:
            return self._named.get(name)

    def configured(self, target: TargetConfig) -> list[Adapter]:
        """Returns the adapters of the configuration. Raises ConfigurationError if one of them cannot be used."""
        adapters = []
        for name, folder in target.lora.items():
            try:
                adapters.append(self._read(name, Path(folder).expanduser()))
            except InvalidRequestError as error:
                raise ConfigurationError(f"target.lora {name!r}: {error}") from error
        return adapters

    def read(self, name: str, path: str) -> Adapter:
        """Copies and checks the adapter in `path`. Raises InvalidRequestError if the target cannot use it."""
        if self._root is None:
            raise InvalidRequestError("this target does not load adapters at run time: set target.lora_root")
        return self._read(name, folder_within(path, self._root))

    def check_room(self) -> None:
        """Raises InvalidRequestError if the engine's memory has no room for another adapter."""
        with self._lock:
            if len(self._in_engine) >= self._limits.num_adapters:
                raise InvalidRequestError(
                    f"this target has {len(self._in_engine)} adapters, which is its limit: unload one, or start it "
                    f"with target.engine_args {{max_cpu_loras: {self._limits.num_adapters + 1}}} or more"
                )

    def publish(self, adapter: Adapter) -> Adapter | None:
        """Gives `adapter` its name. Returns the replaced adapter if the caller must remove it from the engine."""
        with self._lock:
            self._in_engine.add(adapter)
            before, self._named[adapter.name] = self._named.get(adapter.name), adapter
            return self._retire(before) if before is not None else None

    def unpublish(self, name: str) -> tuple[int, Adapter | None]:
        """Removes the name of an adapter. Raises NotFoundError if no adapter has this name.

        Returns the number of running requests with the adapter, and the adapter if the caller must remove it from the
        engine.
        """
        with self._lock:
            adapter = self._named.pop(name, None)
            if adapter is None:
                raise NotFoundError(no_adapter(name))
            return adapter.num_running, self._retire(adapter)

    def acquire(self, name: str, fingerprint: str) -> Adapter:
        """Returns the adapter for a request. The adapter stays in the engine until `release`.

        Raises NotFoundError if no adapter has this name, or if its fingerprint differs from `fingerprint`.
        """
        with self._lock:
            adapter = self._named.get(name)
            if adapter is None or fingerprint not in ("", adapter.fingerprint):
                raise NotFoundError(no_adapter(name))
            adapter.num_running += 1
            return adapter

    def release(self, adapter: Adapter) -> bool:
        """Ends one request's use of `adapter`. Returns True if the caller must remove it from the engine."""
        with self._lock:
            adapter.num_running -= 1
            return adapter.is_retired and adapter.num_running == 0

    def forget(self, adapter: Adapter) -> None:
        """Records that `adapter` is no longer in the engine."""
        with self._lock:
            self._in_engine.discard(adapter)

    def close(self) -> None:
        self._copies.remove()

    def _read(self, name: str, source: Path) -> Adapter:
        AdapterFiles.read(source).check(self._base, self._limits.max_rank)
        with self._lock:
            number = next(self._numbers)
        folder = self._copies.path / str(number)
        adapter = Adapter(name, number, folder, copy_adapter(source, folder))
        try:
            AdapterFiles.read(folder).check(self._base, self._limits.max_rank)  # `source` may have changed meanwhile
        except InvalidRequestError:
            adapter.discard()
            raise
        return adapter

    def _retire(self, adapter: Adapter) -> Adapter | None:
        adapter.is_retired = True
        return None if adapter.num_running else adapter
