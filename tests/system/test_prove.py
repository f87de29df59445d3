"""`outrider prove` on the bundled pair, and its end by Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from services import cli
from tests.waiting import WAIT_S

SMALL = ["--peer", "none", "--target-device", "cpu:0", "--streams", "2", "--answers", "1", "--repeats", "1"]


def test_the_whole_command_on_the_bundled_pair(tmp_path: Path) -> None:
    patient = ["--set", "speculation.draft_timeout_ms=60000", "--set", "speculation.controller=fixed"]
    exact = ["--set", "target.dtype=float32", "--set", "draft.dtype=float32"]
    assert cli.main(["prove", *SMALL, *patient, *exact, "--max-tokens", "16", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["stopped"] is None
    assert not found["missing"]
    assert [one["system"] for one in found["results"]] == ["k = 0", "beside", "remote"]
    assert all(sum(len(answer["token_ids"]) for answer in one["answers"]) == 32 for one in found["results"])
    plain, *drafted = found["results"]
    assert plain["num_drafted"] == 0
    assert all(one["num_accepted"] > 0 for one in drafted)
    assert all(one["plan"]["tokens_per_second"] > 0 for one in found["prediction"])
    assert not any(one["num_different_tokens"] for one in found["differences"].values())


def test_ctrl_c_ends_all_programs_and_leaves_a_report(tmp_path: Path) -> None:
    simulated = ["--set", "target.engine=simulated", "--set", "draft.drafter=simulated"]
    # Answers of 1500 tokens take half a minute.
    command = [sys.executable, "-m", "services.cli", "prove", *SMALL, *simulated, "--max-tokens", "1500"]
    with subprocess.Popen([*command, "--out", str(tmp_path)], stdout=subprocess.PIPE, text=True) as running:
        while len(programs := _programs_below(running.pid)) < 2:  # router and target of k = 0
            assert running.poll() is None
            time.sleep(0.1)
        running.send_signal(signal.SIGINT)
        text, _ = running.communicate(timeout=WAIT_S)
    assert running.returncode == 128 + signal.SIGINT
    assert "not complete, as SIGINT was received" in text
    assert text == (tmp_path / "report.md").read_text()
    assert "- Not measured: `remote` at 2 streams, all repeats" in text
    assert not [pid for pid in programs if _runs(pid)]


def _programs_below(pid: int) -> list[int]:
    children = [
        int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()
    ]
    return [*children, *(below for child in children for below in _programs_below(child))]


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
