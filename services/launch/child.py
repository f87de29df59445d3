"""A program that the launcher runs, and restarts if it dies."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO

from cluster.config.environment import without_settings
from cluster.errors import ConfigurationError, UnavailableError

logger = logging.getLogger(__name__)

# The command line's exit code for a setting that cannot work: a restart would not help.
EXIT_CONFIGURATION = 2

_RESTART_SECONDS = (0.1, 0.5, 2.0, 5.0)
_HEALTHY_AFTER_SECONDS = 30.0
_MAX_STARTS = 3  # of a program that is never ready: it would fail in the same way for ever
_POLL_SECONDS = 0.05
_PR_SET_PDEATHSIG = 1
# PyTorch's compute threads (those of our own kernels have a count of theirs) spin this often before they sleep: long
# enough to bridge the gap between two operators, where a wake-up would cost more than the product (a step of the 190M
# target on 2 threads: 21 ms; 46 when they sleep at once), short enough that a target that waits for drafts leaves the
# cores to the drafter.
_SPIN_COUNT = "30000"
_LIBC = ctypes.CDLL(None)  # loaded here, not in a forked child: another thread may hold a lock that loading needs


class Child:
    """A program in a separate process. It always ends when the thread that started it ends."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        module: str = "services.cli",
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        *,
        address: str | None = None,
        is_heard: bool = False,
    ) -> None:
        """`prefix`: a command that runs another in its place, such as `ip netns exec NAME`.

        `environment` is added to the launcher's. `address`: host:port at which the program listens once it is ready.
        The output goes where the launcher's goes or, if `is_heard`, to `lines`.
        """
        self.name = name
        self._listens_at = address
        self._was_ready = False
        self._last_line = ""  # of what it wrote to stderr
        self._reader: threading.Thread | None = None
        self._environment = environment or {}
        self._is_heard = is_heard
        self._command = [*prefix, sys.executable, "-m", module, *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._num_restarts = 0
        self._restart_at: float | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} was not started"
        return self._process.pid

    def start(self) -> None:
        # The configuration passed to it includes the environment's settings and the decisions derived from them.
        inherited = without_settings(os.environ)
        environment = {"GOMP_SPINCOUNT": _SPIN_COUNT, "PYTHONUNBUFFERED": "1", **inherited, **self._environment}
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if self._is_heard else None,
            stderr=subprocess.STDOUT if self._is_heard else subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the launcher, which ends its children in order
            preexec_fn=_end_with_parent,
        )
        if self._process.stderr is not None:
            self._reader = threading.Thread(target=self._pass_on, args=(self._process.stderr,), daemon=True)
            self._reader.start()
        self._started_at = time.monotonic()

    def lines(self) -> Iterator[str]:
        """Yields the lines that it writes, until it and all of its children have ended."""
        output = None if self._process is None else self._process.stdout
        assert output is not None, f"{self.name} has no output"
        for line in output:
            yield line.decode("utf-8", errors="replace").rstrip()

    def _pass_on(self, output: IO[bytes]) -> None:
        """Writes what the program writes to stderr to the launcher's, and keeps the last line."""
        for line in output:
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
            self._last_line = line.decode("utf-8", errors="replace").strip() or self._last_line

    def watch(self) -> None:
        """Starts the program again, after a pause, if it died.

        Raises ConfigurationError if that is pointless, and UnavailableError if it has ended several times and was never
        ready.
        """
        if self._process is None:
            return
        if (code := self._process.poll()) is None:
            self._was_ready = self._was_ready or self._is_listening()
            return
        now = time.monotonic()
        if code == EXIT_CONFIGURATION:
            raise ConfigurationError(f"the {self.name} could not start; its message is above")
        may_pass = self._listens_at is None or self._was_ready or code == os.EX_TEMPFAIL  # another program has the port
        if not may_pass and self._num_restarts + 1 >= _MAX_STARTS:
            raise UnavailableError(self._describe_end(code))
        if self._restart_at is None:
            if now - self._started_at > _HEALTHY_AFTER_SECONDS:
                self._num_restarts = 0
            pause = _RESTART_SECONDS[min(self._num_restarts, len(_RESTART_SECONDS) - 1)]
            self._restart_at = now + pause
            logger.warning("the %s ended with code %d; restarting it in %.1f s", self.name, code, pause)
        elif now >= self._restart_at:
            self._restart_at = None
            self._num_restarts += 1
            self.start()

    def _is_listening(self) -> bool:
        if self._listens_at is None:
            return False
        host, _, port = self._listens_at.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_POLL_SECONDS).close()
        except OSError:
            return False
        return True

    def _describe_end(self, code: int) -> str:
        """Returns why the program, which ended with `code`, cannot start."""
        if self._reader is not None:
            self._reader.join(timeout=1.0)  # it may still read the last line
        if code == -signal.SIGKILL:
            reason = "it was killed, probably for want of memory: use a smaller model, or set kv_cache_bytes"
        else:
            reason = f"it ended with code {code}. Its last line: {self._last_line or '(none)'}"
        return f"the {self.name} was started {_MAX_STARTS} times and was never ready: {reason}"

    def terminate(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.send_signal(signal.SIGCONT)  # a stopped process reacts to no other signal

    @property
    def exit_code(self) -> int | None:
        """Exit code; None while the program runs."""
        assert self._process is not None, f"{self.name} was not started"
        return self._process.poll()

    def has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def kill(self) -> None:
        """Kills the program and the processes that it started: vLLM computes in a child of the serving process."""
        if self._process is not None:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def end_all(
    children: Sequence[Child],
    seconds: float,
    is_hurried: Callable[[], bool] = lambda: False,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Asks `children` to end and waits for at most `seconds`; then, or if `is_hurried`, kills them.

    Calls `meanwhile` repeatedly.
    """
    for child in children:
        child.terminate()
    deadline = time.monotonic() + seconds
    while not all(child.has_ended() for child in children):
        if is_hurried() or time.monotonic() > deadline:
            break
        meanwhile()
        time.sleep(_POLL_SECONDS)
    for child in children:
        if not child.has_ended():
            if not is_hurried():
                logger.warning("the %s has not ended after %.0f s; killing it", child.name, seconds)
            child.kill()


def _end_with_parent() -> None:
    """Asks the kernel to end this process at once when the thread that started it ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
