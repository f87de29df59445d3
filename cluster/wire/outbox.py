"""Hands messages from an engine's thread to the event loop that sends them."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from typing import Generic, Protocol, Self, TypeVar


class _Mergeable(Protocol):
    def merge(self, newer: Self, /) -> None: ...


MessageT = TypeVar("MessageT", bound=_Mergeable)


class Outbox(Generic[MessageT]):
    """Queue of at most one message. `put` merges into the waiting message, never blocks, and is thread-safe.

    `take` and `close` belong to the event loop in which the outbox was made. A pipe wakes that loop. This costs the
    thread that calls `put` half the processor time of `call_soon_threadsafe`: 30 us instead of 60 us in a step.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._lock = threading.Lock()
        self._waiting: MessageT | None = None
        self._wake_receiver, self._wake_sender = os.pipe()
        self._is_closed = False
        # Close the pipe when the object is collected, if `close` was not called before.
        self._descriptors = [
            weakref.finalize(self, os.close, descriptor) for descriptor in (self._wake_receiver, self._wake_sender)
        ]
        for close_descriptor in self._descriptors:
            close_descriptor.atexit = False  # at exit, the loop may still run in its own thread
        self._loop.add_reader(self._wake_receiver, self._wake)

    def close(self) -> None:
        """Closes the outbox; later messages are lost."""
        self._loop.remove_reader(self._wake_receiver)
        with self._lock:  # a thread may be about to write, and the descriptor's number may be reused for another file
            self._is_closed = True
            for close_descriptor in self._descriptors:
                close_descriptor()

    def put(self, message: MessageT) -> None:
        with self._lock:
            if self._is_closed:
                return
            if self._waiting is not None:
                self._waiting.merge(message)
                return
            self._waiting = message
            os.write(self._wake_sender, b"\0")  # at most one byte per `take`, so it never blocks

    def _wake(self) -> None:
        os.read(self._wake_receiver, 1)
        self._ready.set()

    async def take(self) -> MessageT:
        """Waits for a message and returns it."""
        while (message := self.take_waiting()) is None:
            await self._ready.wait()
        return message

    def take_waiting(self) -> MessageT | None:
        """Returns the waiting message; None if there is none."""
        self._ready.clear()
        with self._lock:
            message, self._waiting = self._waiting, None
        return message
