"""A program that the launcher runs."""

from __future__ import annotations

from pathlib import Path

from services.launch.child import Child
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
