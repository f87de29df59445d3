"""The channel between a worker's process and the process of its engine core.

The worker sends the endpoints of the draft workers ("down"). The engine core sends the outputs of each step, and
several times a second its status ("up"). The channel is a Unix socket in a folder that only its owner may enter. This
project runs both ends, so messages are pickled.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from cluster.coordination.timeline import News
from cluster.owned_folder import OwnedFolder
from cluster.targets.base import GenerationOutput, TargetLoad
from cluster.telemetry.metrics import Reading

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Down: the current endpoints of the draft workers."""

    addresses: Sequence[str]


@dataclass(frozen=True, slots=True)
class Profiled:
    """Down: profiling has ended; all further requests come from clients."""


@dataclass(frozen=True, slots=True)
class VocabularyMessage:
    """Down, before the first request with a grammar: the tokenizer data for grammars."""

    written: str


@dataclass(frozen=True, slots=True)
class Outputs:
    """Up: the tokens of one step."""

    outputs: Sequence[GenerationOutput]


@dataclass(frozen=True, slots=True)
class Status:
    """Up: the engine's status."""

    load: TargetLoad
    is_stuck: bool
    readings: Sequence[Reading]
    news: News  # steps and drafters' answers since the last status


@dataclass(frozen=True, slots=True)
class Failed:
    """Up: the engine is about to end because of `cause`."""

    cause: str


class Channel:
    """One end of the channel. Its thread passes messages to `receive`, and calls `closed` when the peer is gone."""

    def __init__(
        self, connection: Connection, receive: Callable[[Any], None], closed: Callable[[], None] = lambda: None
    ) -> None:
        self._connection = connection
        self._receive = receive
        self._closed = closed
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="channel-reader", daemon=True).start()
        threading.Thread(target=self._write, name="channel-writer", daemon=True).start()

    def send(self, message: Any) -> None:
        """Sends `message`; drops it if the peer is gone. Thread-safe; never blocks."""
        self._outbox.put(message)

    def _read(self) -> None:
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                self._closed()
                return
            try:
                self._receive(message)
            except Exception:  # an unusable message must not block the next one
                logger.exception("a message of the engine's channel could not be processed")

    def _write(self) -> None:
        try:
            while True:
                self._connection.send(self._outbox.get())
        except OSError:
            pass  # the reading thread detects that the peer is gone


class ChannelListener:
    """The worker's end of the channel before the engine core connects."""

    def __init__(self) -> None:
        self._folder = OwnedFolder("outrider-engine-")  # if this process is killed, the next target deletes the folder
        self.address = str(self._folder.path / "channel")
        self._listener = Listener(self.address, "AF_UNIX")

    def accept(self, receive: Callable[[Any], None], closed: Callable[[], None]) -> Channel:
        """Returns the worker's end after the engine core has connected, which it does before it reports as ready."""
        connection = self._listener.accept()
        self.close()
        return Channel(connection, receive, closed)

    def close(self) -> None:
        self._listener.close()
        self._folder.remove()


def connect(address: str, receive: Callable[[Any], None], closed: Callable[[], None]) -> Channel:
    """Returns the engine core's end of the channel at `address`."""
    return Channel(Client(address, "AF_UNIX"), receive, closed)
