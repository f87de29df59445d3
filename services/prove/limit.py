"""Stops a measurement early: at a time limit, on Ctrl-C or on SIGTERM."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """The measurement was stopped early; the message is the reason."""


class TimeLimit:
    """Raises Stopped in the main thread, once, after `seconds` or on SIGINT or SIGTERM.

    with TimeLimit(60) as limit:
        ...
        with limit.shielded():  # not here
            ...
    """

    def __init__(self, seconds: float) -> None:
        self.reason: str | None = None  # None: not reached
        self.signum: int | None = None  # the received signal, if any
        self._seconds = seconds
        self._ends_at = 0.0
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        self._is_shielded = False
        self._has_raised = False
        self._handlers: dict[int, Any] = {}

    def is_reached(self) -> bool:
        return self.reason is not None

    def check(self) -> None:
        """Raises Stopped if the limit was reached while it was shielded."""
        if self.reason is not None and not self._has_raised:
            self._has_raised = True
            raise Stopped(self.reason)

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Defers the exception: nothing is raised in the context, but `is_reached` still changes."""
        before, self._is_shielded = self._is_shielded, True
        try:
            yield
        finally:
            self._is_shielded = before

    def __enter__(self) -> TimeLimit:
        self._handlers = {signum: signal.signal(signum, self._note) for signum in _SIGNALS}
        self._ends_at = time.monotonic() + self._seconds
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)

    def _end(self) -> None:
        if self.reason is None:
            self.reason = f"the time limit of {self._seconds / 60:g} minutes was reached"
            os.kill(os.getpid(), signal.SIGINT)  # interrupts the main thread even while it waits

    def _note(self, signum: int, _: FrameType | None) -> None:
        if self.reason is None:
            self.signum = signum
            self.reason = f"{signal.Signals(signum).name} was received"
        if not self._is_shielded:
            self.check()
