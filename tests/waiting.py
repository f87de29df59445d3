"""Waiting for what other threads and programs do, by looking again and again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

WAIT_S = 300.0  # deadline for what must happen, far beyond what it takes where other work slows the machine down


def eventually(condition: Callable[[], bool], timeout_s: float = WAIT_S, pause_s: float = 0.05) -> bool:
    """Waits for `condition`. Returns whether it becomes true within `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
    return True


def wait_until(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    assert eventually(condition, timeout_s, pause_s=0.005), "timed out"


async def until(condition: Callable[[], bool]) -> None:
    """Waits for `condition` in an event loop. The caller sets the time limit."""
    while not condition():  # noqa: ASYNC110  # whatever it is about has no event
        await asyncio.sleep(0.005)


async def turns() -> None:
    """Lets the event loop run ten turns. In each it polls its pipes and runs the tasks that are ready."""
    for _ in range(10):
        await asyncio.sleep(0)
