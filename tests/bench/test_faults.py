"""The fault table in its short form: faults of every kind of program."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.faults import FAULTS
from tests.soak import length
from tests.waiting import WAIT_S

ROOT = Path(__file__).parents[2]
SECONDS = 500
NUM_STREAMS = length(4, 8)
# Faults that restart programs take CPU time; faults that pause or disconnect programs take elapsed time. Each group of
# faults has its own cluster, and the clusters run at the same time. A program takes 2 CPU seconds to start, so
# `make test` leaves out faults that tests/system covers for targets and drafts.
ALL = (("kill", "drain", "rolling restart"), ("freeze", "cut off", "slow"))
GROUPS = length((("cut off",),), ALL)


def test_no_request_fails_and_no_token_differs(tmp_path: Path) -> None:
    """Runs each group in its own process, because `bench.faults` may enter network namespaces."""
    assert {fault for group in ALL for fault in group} == FAULTS.keys()
    folders = [tmp_path / group[0] for group in GROUPS]
    with contextlib.ExitStack() as running:
        started = [running.enter_context(_started(*one)) for one in zip(GROUPS, folders, strict=True)]
        deadline = time.monotonic() + SECONDS
        for folder, process in zip(folders, started, strict=True):
            code = process.wait(max(0.0, deadline - time.monotonic()))
            assert code == 0, (folder / "said").read_text(encoding="utf-8")[-20_000:]
    for group, folder in zip(GROUPS, folders, strict=True):
        rows = json.loads((folder / "faults.json").read_text(encoding="utf-8"))["rows"]
        assert len(rows) == 1 + len(group) * 3
        for row in rows:
            assert row["num_sent"] == row["num_finished"] >= NUM_STREAMS, row
            assert row["num_different_tokens"] == 0, row


@contextlib.contextmanager
def _started(faults: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    folder.mkdir()
    command = [sys.executable, "-m", "bench.faults", "--short", "--streams", str(NUM_STREAMS)]
    command += ["--faults", ",".join(faults), "--out", str(folder / "faults.json")]
    with (folder / "said").open("wb") as said:  # a pipe that nobody reads would hold the programs up
        process = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:  # the process still runs if another group failed
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # it ends its cluster and takes its namespaces away
            try:
                process.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
