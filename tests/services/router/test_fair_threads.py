"""Keys use threads in turns, whatever one of them submits."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from services.router.http.fair_threads import FairThreads

WAIT_S = 30


class Blocked:
    """Work that runs until it is let go, and notes its order."""

    def __init__(self, order: list[str]) -> None:
        self._order = order
        self.gates: dict[str, threading.Event] = {}
        self.begun: dict[str, threading.Event] = {}

    def submit(self, threads: FairThreads, owner: str | None, name: str) -> Future[str]:
        gate, begun = self.gates.setdefault(name, threading.Event()), self.begun.setdefault(name, threading.Event())

        def work() -> str:
            self._order.append(name)
            begun.set()
            assert gate.wait(WAIT_S)
            return name

        return threads.submit(owner, work)


def test_a_key_never_has_all_threads_and_a_router_without_keys_has() -> None:
    order: list[str] = []
    blocked, threads = Blocked(order), FairThreads(2)
    futures = [blocked.submit(threads, "a", f"a{index}") for index in range(3)]
    assert blocked.begun["a0"].wait(WAIT_S)
    futures.append(blocked.submit(threads, "b", "b0"))
    assert blocked.begun["b0"].wait(WAIT_S)  # although two works of a came first
    assert order == ["a0", "b0"]
    for gate in blocked.gates.values():
        gate.set()
    assert [future.result(WAIT_S) for future in futures] == ["a0", "a1", "a2", "b0"]
    nobody = [blocked.submit(threads, None, name) for name in ("x", "y")]
    assert all(blocked.begun[name].wait(WAIT_S) for name in ("x", "y"))
    blocked.gates["x"].set()
    blocked.gates["y"].set()
    assert [future.result(WAIT_S) for future in nobody] == ["x", "y"]


def test_who_has_used_less_is_next() -> None:
    order: list[str] = []
    blocked, threads = Blocked(order), FairThreads(1)
    futures = [blocked.submit(threads, "heavy", f"heavy{index}") for index in range(3)]
    assert blocked.begun["heavy0"].wait(WAIT_S)
    futures += [blocked.submit(threads, "light", f"light{index}") for index in range(2)]
    for gate in blocked.gates.values():
        gate.set()
    for future in futures:
        future.result(WAIT_S)
    assert order[:2] == ["heavy0", "light0"]


def test_errors_and_cancelled_work_keep_nobody_waiting() -> None:
    order: list[str] = []
    blocked, threads = Blocked(order), FairThreads(1)
    first = blocked.submit(threads, "a", "a0")
    assert blocked.begun["a0"].wait(WAIT_S)
    cancelled = blocked.submit(threads, "a", "a1")
    assert cancelled.cancel()

    def fail() -> None:
        raise ValueError("no")

    failing = threads.submit("b", fail)
    blocked.gates["a0"].set()
    assert first.result(WAIT_S) == "a0"
    with pytest.raises(ValueError, match="no"):
        failing.result(WAIT_S)
    assert threads.submit("a", lambda: 5).result(WAIT_S) == 5
    assert order == ["a0"]
