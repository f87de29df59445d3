"""Keeps the links to the draft workers up, in its own thread."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import threading
from collections.abc import Sequence

from cluster.coordination.pool import DraftPool
from cluster.interpreter import switch_threads_soon
from cluster.placement.endpoints import follow

logger = logging.getLogger(__name__)

_STOP_SECONDS = 5.0


class LinkThread:
    """Runs `pool` over `addresses` from `start` to `stop`."""

    def __init__(self, pool: DraftPool, addresses: Sequence[str]) -> None:
        self._pool = pool
        self._addresses = addresses
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="outrider-links", daemon=True)

    def start(self) -> None:
        switch_threads_soon()
        self._thread.start()
        atexit.register(self.stop)  # runs before the objects that the links use are closed

    def stop(self) -> None:
        """Stops the links; the draft workers then drop this engine's sequences."""
        atexit.unregister(self.stop)
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._cancel)
            self._thread.join(_STOP_SECONDS)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._follow())

    async def _follow(self) -> None:
        self._task = asyncio.current_task()
        try:
            await self._pool.run(follow(self._addresses))
        except Exception:
            logger.exception("the links to the draft workers have ended; requests are decoded without drafts")
