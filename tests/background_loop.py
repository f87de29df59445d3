"""Event loop in a thread of its own: servers and links run there while the test waits for them in its thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any

from tests.waiting import WAIT_S


class BackgroundLoop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._ending: list[concurrent.futures.Future[Any]] = []

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        """Starts it, and returns a future to cancel it with."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.start(coroutine).result(timeout=WAIT_S)

    def let_end(self, future: concurrent.futures.Future[Any]) -> None:
        """Waits for `future` only when all is over: a server takes two tenths of a second to shut down."""
        self._ending.append(future)

    def stop(self) -> None:
        for future in self._ending:
            future.result(timeout=WAIT_S)
        self.run(self._cancel_the_rest())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _cancel_the_rest(self) -> None:
        """A task that was cancelled must have its turn to end before the loop does."""
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
