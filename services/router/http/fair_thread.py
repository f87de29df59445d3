"""A thread that API keys share fairly."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

_NICE = 10  # of the thread; only on Linux each thread has a priority of its own

_Work = tuple[Future[Any], Callable[[], Any]]


@dataclass(slots=True)
class _Owner:
    waiting: deque[_Work] = field(default_factory=deque)
    seconds: float = 0.0  # its virtual time: begins at the least of the others, grows by the time of its work


class FairThread:
    """Thread whose next work is that of the owner who has used it least. The event loop takes precedence over it.

    Virtual time as in start-time fair queueing (Goyal and others, 1996), with the measured time of each work as its
    cost.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "large-work", initializer=_give_precedence)
        self._lock = threading.Lock()
        self._owners: dict[str | None, _Owner] = {}  # those whose work waits or runs

    def submit(self, name: str | None, work: Callable[[], T]) -> Future[T]:
        """Returns the future of `work`. `name`: its owner; None: no key."""
        future: Future[T] = Future()
        with self._lock:
            if name not in self._owners:
                least = min((owner.seconds for owner in self._owners.values()), default=0.0)
                self._owners[name] = _Owner(seconds=least)
            self._owners[name].waiting.append((future, work))
        self._executor.submit(self._run_next)
        return future

    def _run_next(self) -> None:
        with self._lock:
            waiting = [(owner.seconds, index, name) for index, (name, owner) in enumerate(self._owners.items())]
            _, _, name = min(waiting)
            owner = self._owners[name]
            future, work = owner.waiting.popleft()
        begun_at = time.monotonic()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
        with self._lock:
            owner.seconds += time.monotonic() - begun_at
            if not owner.waiting:
                del self._owners[name]


def _give_precedence() -> None:
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
