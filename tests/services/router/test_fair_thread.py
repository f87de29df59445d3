"""Keys use a thread in turns, whatever one of them submits."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from services.router.http.fair_thread import FairThread

WAIT_S = 30


class Blocked:
    """Work that runs until it is let go, and notes its order."""

    def __init__(self, order: list[str]) -> None:
        self._order = order
        self.gates: dict[str, threading.Event] = {}
        self.begun: dict[str, threading.Event] = {}

    def submit(self, thread: FairThread, owner: str | None, name: str) -> Future[str]:
        gate, begun = self.gates.setdefault(name, threading.Event()), self.begun.setdefault(name, threading.Event())

        def work() -> str:
            self._order.append(name)
            begun.set()
            assert gate.wait(WAIT_S)
            return name

        return thread.submit(owner, work)


def test_who_has_used_less_is_next() -> None:
    order: list[str] = []
    blocked, thread = Blocked(order), FairThread()
    futures = [blocked.submit(thread, "heavy", f"heavy{index}") for index in range(3)]
    assert blocked.begun["heavy0"].wait(WAIT_S)
    futures += [blocked.submit(thread, "light", f"light{index}") for index in range(2)]
    for gate in blocked.gates.values():
        gate.set()
    for future in futures:
        future.result(WAIT_S)
    assert order[:2] == ["heavy0", "light0"]


def test_errors_and_cancelled_work_keep_nobody_waiting() -> None:
    order: list[str] = []
    blocked, thread = Blocked(order), FairThread()
    first = blocked.submit(thread, "a", "a0")
    assert blocked.begun["a0"].wait(WAIT_S)
    cancelled = blocked.submit(thread, "a", "a1")
    assert cancelled.cancel()

    def fail() -> None:
        raise ValueError("no")

    failing = thread.submit("b", fail)
    blocked.gates["a0"].set()
    assert first.result(WAIT_S) == "a0"
    with pytest.raises(ValueError, match="no"):
        failing.result(WAIT_S)
    assert thread.submit("a", lambda: 5).result(WAIT_S) == 5
    assert order == ["a0"]
