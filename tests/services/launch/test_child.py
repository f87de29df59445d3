"""A program that the launcher runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.errors import UnavailableError
from services.launch.child import Child
from services.launch.local import free_ports
from tests.waiting import wait_until


def _is_running(pid: int) -> bool:
    """A process that has ended and was not waited for does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_a_program_started_ends_with_it_when_it_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    prefix = ["sh", "-c", 'sleep 600 & echo $! > "$0.new"; mv "$0.new" "$0"; exec "$@"', str(file)]
    child = Child("program", ["0", "--bind", "127.0.0.1"], module="http.server", prefix=prefix)
    child.start()
    wait_until(file.exists)
    below = int(file.read_text())
    assert _is_running(below)
    child.kill()
    assert child.has_ended()
    wait_until(lambda: not _is_running(below))
    child.kill()  # once more does nothing


def test_a_program_that_is_never_ready_is_given_up_with_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.launch.child._RESTART_SECONDS", (0.01,))
    child = Child("program", ["0", "--bind", "192.0.2.1"], module="http.server", address="127.0.0.1:1")
    child.start()
    with pytest.raises(UnavailableError, match=r"started 3 times and was never ready.*Cannot assign requested address"):
        watch_until(child, lambda: False)


def test_a_program_that_was_ready_is_started_again_however_often_it_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.launch.child._RESTART_SECONDS", (0.01,))
    (port,) = free_ports(1)
    arguments = [str(port), "--bind", "127.0.0.1"]
    child = Child("program", arguments, module="http.server", address=f"127.0.0.1:{port}")
    child.start()
    watch_until(child, lambda: child._was_ready)
    for _ in range(4):
        pid = child.pid
        os.kill(pid, signal.SIGKILL)
        watch_until(child, lambda pid=pid: child.pid != pid)
    child.kill()


def watch_until(child: Child, condition: Callable[[], bool]) -> None:
    def watched() -> bool:
        child.watch()
        return condition()

    wait_until(watched)
