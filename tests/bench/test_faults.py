"""The fault table in its short form: every fault, of every kind of program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_request_fails_and_no_token_differs(tmp_path: Path) -> None:
    """In a process of its own, as it may enter a network namespace."""
    out = tmp_path / "faults.json"
    command = [sys.executable, "-m", "bench.faults", "--short", "--streams", "8", "--out", str(out)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-4000:]
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 1 + 6 * 3
    for row in rows:
        assert row["num_sent"] == row["num_finished"] >= 8, row
        assert row["num_different_tokens"] == 0, row
