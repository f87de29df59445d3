"""The fault table in its short form: every fault, of every kind of program."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.faults import FAULTS

ROOT = Path(__file__).parents[2]
SECONDS = 500
# Programs that start take a processor, what is lost for a while takes time: each half has a cluster, at the same time.
HALVES = (("kill", "drain", "rolling restart"), ("freeze", "cut off", "slow"))


def test_no_request_fails_and_no_token_differs(tmp_path: Path) -> None:
    """In processes of their own, as they may enter network namespaces."""
    assert {fault for half in HALVES for fault in half} == FAULTS.keys()
    folders = [tmp_path / half[0] for half in HALVES]
    started = [_start(half, folder) for half, folder in zip(HALVES, folders, strict=True)]
    for half, folder, process in zip(HALVES, folders, started, strict=True):
        assert process.wait(SECONDS) == 0, (folder / "said").read_text(encoding="utf-8")[-20_000:]
        rows = json.loads((folder / "faults.json").read_text(encoding="utf-8"))["rows"]
        assert len(rows) == 1 + len(half) * 3
        for row in rows:
            assert row["num_sent"] == row["num_finished"] >= 8, row
            assert row["num_different_tokens"] == 0, row


def _start(faults: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    folder.mkdir()
    command = [sys.executable, "-m", "bench.faults", "--short", "--streams", "8"]
    command += ["--faults", ",".join(faults), "--out", str(folder / "faults.json")]
    with (folder / "said").open("wb") as said:  # a pipe that nobody reads would hold the programs up
        return subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT)
