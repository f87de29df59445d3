"""One program as a child process: its output goes to the log, and its last error is kept."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import services
from cluster.telemetry.logs import read_line
from services.launch.child import EXIT_CONFIGURATION, Child, end_all

logger = logging.getLogger("ray.serve.outrider")  # below Serve's logger, so that messages reach the replica's log

_START_SECONDS = 10.0
_LAST_WORDS_SECONDS = 0.5
# The last line of a traceback, and the command line's message about an unusable setting.
_COMPLAINT = re.compile(r"(\w+\.)*\w*(Error|Exception|Interrupt)\b.*|outrider \w+: .*")


def python_path() -> str:
    """Returns the path with which a program can import this process's modules: Ray may have changed only `sys.path`."""
    root = str(Path(services.__file__).parent.parent)
    return os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))


class Program:
    """A program that runs from `start` until it ends or is stopped. It ends with this process in any case."""

    def __init__(self, name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self.epoch = 0  # greater for one that was started later
        self._child = Child(name, arguments, environment=environment, is_heard=True)
        self._complaint: str | None = None
        self._has_started = threading.Event()
        # A child ends with the thread that started it, so that thread lives as long as the child.
        self._thread = threading.Thread(target=self._run, name=f"{name} program", daemon=True)

    def start(self) -> None:
        self.epoch = time.time_ns()
        self._thread.start()
        if not self._has_started.wait(_START_SECONDS):
            raise RuntimeError(f"the {self.name} program could not be started")

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def complaint(self) -> str | None:
        """The last error that it reported."""
        return self._complaint

    def end(self) -> str | None:
        """Returns how the program ended, in a line; None while it runs."""
        code = self._child.exit_code
        if code is None:
            return None
        self._thread.join(_LAST_WORDS_SECONDS)  # its last output may still be on its way
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        if code == EXIT_CONFIGURATION and self._complaint is not None:
            return f"the {self.name} cannot start: {self._complaint}"
        return f"the {self.name} {how}" + (f"; its last error: {self._complaint}" if self._complaint else "")

    def stop(self, seconds: float) -> None:
        """Asks the program to end, which it does after draining, and waits for at most `seconds`."""
        if self._has_started.is_set():
            end_all([self._child], seconds)

    def _run(self) -> None:
        self._child.start()
        self._has_started.set()
        for line in self._child.lines():
            if line:
                self._hear(line)

    def _hear(self, line: str) -> None:
        logged = read_line(line)
        level, text = logged or (logging.INFO, line)
        if level >= logging.ERROR or _COMPLAINT.fullmatch(line):
            self._complaint = text
            level = logging.ERROR
        logger.log(level, "%s", line if line.startswith("{") else text)  # keeps a JSON object whole
