"""The hook that checks commit messages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HOOK = Path(__file__).parent.parent / ".ci" / "check_commit_message.py"
BODY = "\n\nA stream was silent for 60 s.\n"


def check(message: str, folder: Path) -> subprocess.CompletedProcess[str]:
    file = folder / "message"
    file.write_text(message, encoding="utf-8")
    return subprocess.run([sys.executable, str(HOOK), str(file)], check=False, capture_output=True, text=True)


@pytest.mark.parametrize(
    "message",
    [
        "router: keep the connection alive while a prompt is computed" + BODY,
        "cluster, router: group modules by topic" + BODY + "# a comment of git's",
        'Revert "router: keep the connection alive"',
    ],
)
def test_a_good_message_passes(message: str, tmp_path: Path) -> None:
    assert check(message, tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ("keep the connection alive" + BODY, "is not `area: imperative sentence`"),
        ("router: keep the connection alive." + BODY, "without a full stop"),
        ("router: " + "a" * 70 + BODY, "at most 72"),
        ("router: keep the connection alive\n", "there is no body"),
        ("router: keep the connection alive\nat once\nand so on", "second line"),
    ],
)
def test_a_bad_one_is_refused_by_name(message: str, complaint: str, tmp_path: Path) -> None:
    done = check(message, tmp_path)
    assert done.returncode == 1
    assert complaint in done.stderr
