"""Loads LoRA adapters into a running vLLM engine, and removes them when no request uses them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from cluster.errors import InternalError, InvalidRequestError, OutriderError, first_line
from cluster.vllm.target.adapters import Adapter, Adapters

logger = logging.getLogger(__name__)

_LINGER_SECONDS = 30.0  # time until the copy of an unloaded adapter is deleted


class AdapterLoader:
    """Loads and unloads adapters. Belongs to the thread of the engine's client."""

    def __init__(self, adapters: Adapters, llm: AsyncLLM, engine_died: Callable[[], None]) -> None:
        self._adapters = adapters
        self._llm = llm
        self._engine_died = engine_died
        self._changing = asyncio.Lock()
        self._taken_out: set[asyncio.Task[None]] = set()  # keeps references: asyncio drops tasks without one

    async def load(self, name: str, path: str, *, replace: bool) -> str:
        """Loads an adapter. Returns its fingerprint.

        Raises InvalidRequestError, and changes nothing, if the adapter cannot be loaded.
        """
        async with self._changing:
            adapter = await asyncio.to_thread(self._adapters.read, name, path)
            try:
                present = self._adapters.named(name)
                if present is not None and present.fingerprint == adapter.fingerprint:
                    adapter.discard()
                    return present.fingerprint
                if present is not None and not replace:
                    raise InvalidRequestError(
                        f"an adapter {name!r} with other contents is loaded: unload it, or ask to replace it"
                    )
                self._adapters.check_room()
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
            num_running, unused = self._adapters.unpublish(name)
            if unused is not None:
                await self._take_out(unused)
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
        replaced = self._adapters.publish(adapter)
        if replaced is not None:
            await self._take_out(replaced)

    def release(self, adapter: Adapter) -> None:
        """Records that a request with `adapter` has ended. Unloads a replaced adapter after its last request."""
        if self._adapters.release(adapter):
            task = asyncio.get_running_loop().create_task(self._take_out(adapter))
            self._taken_out.add(task)
            task.add_done_callback(self._taken_out.discard)

    async def _take_out(self, adapter: Adapter) -> None:
        """Unloads `adapter` from the engine. No running request may use it."""
        try:
            await self._llm.remove_lora(adapter.number)
        except EngineDeadError:
            self._engine_died()
        except Exception:
            logger.exception("vLLM could not unload the adapter %s", adapter.name)
        self._adapters.forget(adapter)
        # The engine may read the folder again for an aborted request, before the abort reaches it.
        asyncio.get_running_loop().call_later(_LINGER_SECONDS, adapter.discard)
