"""A pool of threads that API keys share fairly."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

_Work = tuple[Future[Any], Callable[[], Any]]


@dataclass(slots=True)
class _Owner:
    waiting: deque[_Work] = field(default_factory=deque)
    num_running: int = 0
    seconds: float = 0.0  # its virtual time: begins at the least of the others, grows by the time of its work


class FairThreads:
    """Threads whose next work is that of the owner who has used them least.

    Virtual time as in start-time fair queueing (Goyal and others, 1996), with the measured time of each work as its
    cost. Work cannot be interrupted, so an owner with a name gets all threads but one.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="large-work")
        self._lock = threading.Lock()
        self._owners: dict[str | None, _Owner] = {}  # those with work

    def submit(self, name: str | None, work: Callable[[], T]) -> Future[T]:
        """Returns the future of `work`. `name`: its owner; None: no key, whose work may use all threads."""
        future: Future[T] = Future()
        with self._lock:
            if name not in self._owners:
                least = min((owner.seconds for owner in self._owners.values()), default=0.0)
                self._owners[name] = _Owner(seconds=least)
            self._owners[name].waiting.append((future, work))
        self._executor.submit(self._run_while_allowed)
        return future

    def _run_while_allowed(self) -> None:
        while (taken := self._take()) is not None:
            name, (future, work) = taken
            begun_at = time.monotonic()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
            self._end(name, time.monotonic() - begun_at)

    def _take(self) -> tuple[str | None, _Work] | None:
        """Returns the next work and its owner; None if all owners with work have their share of threads."""
        with self._lock:
            allowed = [
                (owner.seconds, index, name)
                for index, (name, owner) in enumerate(self._owners.items())
                if owner.waiting and (name is None or owner.num_running < max(1, self._num_threads - 1))
            ]
            if not allowed:
                return None
            _, _, name = min(allowed)
            owner = self._owners[name]
            owner.num_running += 1
            return name, owner.waiting.popleft()

    def _end(self, name: str | None, seconds: float) -> None:
        with self._lock:
            owner = self._owners[name]
            owner.num_running -= 1
            owner.seconds += seconds
            if not owner.waiting and not owner.num_running:
                del self._owners[name]
