"""Hands messages from an engine's thread to the event loop that sends them."""

from __future__ import annotations

import asyncio
import threading
from typing import Generic, Protocol, Self, TypeVar


class _Mergeable(Protocol):
    def merge(self, newer: Self, /) -> None: ...


MessageT = TypeVar("MessageT", bound=_Mergeable)


class Outbox(Generic[MessageT]):
    """At most one message waits: `put` merges into it, never blocks, and may be called from any thread.

    `take` belongs to the event loop in which the outbox was made.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._lock = threading.Lock()
        self._waiting: MessageT | None = None

    def put(self, message: MessageT) -> None:
        with self._lock:
            if self._waiting is not None:
                self._waiting.merge(message)
                return
            self._waiting = message
        self._loop.call_soon_threadsafe(self._ready.set)

    async def take(self) -> MessageT:
        """Waits for a message."""
        await self._ready.wait()
        self._ready.clear()
        with self._lock:
            message, self._waiting = self._waiting, None
        assert message is not None
        return message
