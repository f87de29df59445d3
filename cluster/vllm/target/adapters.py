"""The LoRA adapters of a vLLM target: loads them into its running engine, and removes them after their last request.

vLLM identifies an adapter by a number and a folder, and this module uses new ones for each loaded adapter. So if a name
gets another adapter, vLLM does not reuse the KV of the previous one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from cluster.config.workers import TargetConfig
from cluster.errors import (
    ConfigurationError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    OutriderError,
    first_line,
)
from cluster.owned_folder import OwnedFolder
from cluster.targets.base import no_adapter
from cluster.vllm.target.adapter_folder import AdapterFiles, BaseModel, copy_adapter, open_adapter
from cluster.vllm.target.lora import LoraLimits

logger = logging.getLogger(__name__)

_LINGER_SECONDS = 30.0  # time until the copy of an unloaded adapter is deleted


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
    """All adapters of a target. For the thread of the engine's client, unless noted."""

    def __init__(self, target: TargetConfig, base: BaseModel, limits: LoraLimits) -> None:
        """`connect` must be called before adapters are loaded."""
        self._root = None if target.lora_root is None else Path(target.lora_root)
        self._base = base
        self._limits = limits
        self._copies = OwnedFolder("outrider-adapters-")
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._named: dict[str, Adapter] = {}
        self._in_engine: set[Adapter] = set()  # named adapters, and adapters of running requests
        self._llm: AsyncLLM
        self._engine_died: Callable[[], None]
        self._changing = asyncio.Lock()
        self._taken_out: set[asyncio.Task[None]] = set()  # keeps references: asyncio drops tasks without one

    def connect(self, llm: AsyncLLM, engine_died: Callable[[], None]) -> None:
        """Sets the engine's client. `engine_died` is called if the engine core has ended."""
        self._llm, self._engine_died = llm, engine_died

    @property
    def fingerprints(self) -> dict[str, str]:
        """Fingerprints of the adapters by name. Thread-safe."""
        with self._lock:
            return {name: adapter.fingerprint for name, adapter in self._named.items()}

    def configured(self, target: TargetConfig) -> list[Adapter]:
        """Returns the adapters of the configuration. Raises ConfigurationError if one of them cannot be used."""
        adapters = []
        for name, folder in target.lora.items():
            try:
                adapters.append(self._read(name, str(Path(folder).expanduser().absolute()), None))
            except InvalidRequestError as error:
                raise ConfigurationError(f"target.lora {name!r}: {error}") from error
        return adapters

    async def load(self, name: str, path: str, *, replace: bool) -> str:
        """Loads an adapter. Returns its fingerprint.

        Raises InvalidRequestError, and changes nothing, if the adapter cannot be loaded.
        """
        root = self._root
        if root is None:
            raise InvalidRequestError("this target does not load adapters at run time: set target.lora_root")
        async with self._changing:
            adapter = await asyncio.to_thread(self._read, name, path, root)
            try:
                present = self._named.get(name)
                if present is not None and present.fingerprint == adapter.fingerprint:
                    adapter.discard()
                    return present.fingerprint
                if present is not None and not replace:
                    raise InvalidRequestError(
                        f"an adapter {name!r} with other contents is loaded: unload it, or ask to replace it"
                    )
                self._check_room()
                await self.add(adapter)
            except OutriderError:
                adapter.discard()
                raise
            return adapter.fingerprint

    async def unload(self, name: str) -> int:
        """Unloads the adapter for new requests. Returns the number of requests that still run with it.

        Raises NotFoundError if no adapter has this name.
        """
        async with self._changing:
            with self._lock:
                adapter = self._named.pop(name, None)
                if adapter is None:
                    raise NotFoundError(no_adapter(name))
                num_running = adapter.num_running
            await self._retire(adapter)
            return num_running

    async def add(self, adapter: Adapter) -> None:
        """Loads `adapter` into the engine, so that requests can name it.

        Raises InvalidRequestError, and changes nothing, if vLLM cannot load or apply the adapter.
        """
        try:
            await self._llm.add_lora(adapter.request())
            (unapplied, *_) = await self._llm.collective_rpc("unapplied_modules", args=(adapter.number,))
            if unapplied:
                raise InvalidRequestError(f"this model has no {', '.join(unapplied)[:256]} that an adapter can change")
        except EngineDeadError as error:
            self._engine_died()
            raise InternalError("vLLM's engine core has ended") from error
        except Exception as error:
            with contextlib.suppress(Exception):  # the engine may not have loaded the adapter
                await self._llm.remove_lora(adapter.number)
            if isinstance(error, InvalidRequestError):
                raise
            raise InvalidRequestError(f"vLLM cannot load the adapter: {first_line(error)}") from error
        self._in_engine.add(adapter)
        with self._lock:
            replaced, self._named[adapter.name] = self._named.get(adapter.name), adapter
        if replaced is not None:
            await self._retire(replaced)

    def acquire(self, name: str, fingerprint: str) -> Adapter:
        """Returns the adapter for a request. The adapter stays in the engine until `release`.

        Raises NotFoundError if no adapter has this name, or if its fingerprint differs from `fingerprint`. Thread-safe.
        """
        with self._lock:
            adapter = self._named.get(name)
            if adapter is None or fingerprint not in ("", adapter.fingerprint):
                raise NotFoundError(no_adapter(name))
            adapter.num_running += 1
            return adapter

    def release(self, adapter: Adapter) -> None:
        """Records that a request with `adapter` has ended. Unloads an adapter without a name after its last request."""
        with self._lock:
            adapter.num_running -= 1
        if adapter.is_retired and adapter.num_running == 0:
            task = asyncio.get_running_loop().create_task(self._take_out(adapter))
            self._taken_out.add(task)
            task.add_done_callback(self._taken_out.discard)

    def close(self) -> None:
        self._copies.remove()

    def _read(self, name: str, path: str, root: Path | None) -> Adapter:
        with self._lock:
            number = next(self._numbers)
        folder = self._copies.path / str(number)
        max_rank = self._limits.max_rank
        with open_adapter(path, root) as files:
            fingerprint = copy_adapter(files, folder, self._base.max_adapter_bytes(max_rank))
        adapter = Adapter(name, number, folder, fingerprint)
        try:
            AdapterFiles.read(folder, path[:256]).check(self._base, max_rank)
        except InvalidRequestError:
            adapter.discard()
            raise
        return adapter

    def _check_room(self) -> None:
        """Raises InvalidRequestError if the engine's memory has no room for another adapter."""
        if len(self._in_engine) >= self._limits.num_adapters:
            raise InvalidRequestError(
                f"this target has {len(self._in_engine)} adapters, which is its limit: unload one, or start it "
                f"with target.engine_args {{max_cpu_loras: {self._limits.num_adapters + 1}}} or more"
            )

    async def _retire(self, adapter: Adapter) -> None:
        """Unloads `adapter`, which has lost its name, now or after its last request."""
        adapter.is_retired = True
        if adapter.num_running == 0:
            await self._take_out(adapter)

    async def _take_out(self, adapter: Adapter) -> None:
        """Unloads `adapter` from the engine. No running request may use it."""
        try:
            await self._llm.remove_lora(adapter.number)
        except EngineDeadError:
            self._engine_died()
        except Exception:
            logger.exception("vLLM could not unload the adapter %s", adapter.name)
        self._in_engine.discard(adapter)
        # The engine may read the folder again for an aborted request, before the abort reaches it.
        asyncio.get_running_loop().call_later(_LINGER_SECONDS, adapter.discard)
