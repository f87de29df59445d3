"""A program as a child: its words go into the log, its end is told in a line, it never outlives its replica."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from cluster.config import Config
from services.launch.local import free_ports
from services.launch.ray.probe import WorkerProbe
from services.launch.ray.program import Program
from tests.waiting import eventually

SIMULATED = ("--set", "draft.drafter=simulated", "--set", "target.engine=simulated")


@pytest.fixture
def draft() -> Iterator[tuple[Program, str]]:
    """A draft worker, and where it listens."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    program = Program("draft", ["draft", "--set", f"draft.listen={address}", *SIMULATED], {})
    program.start()
    yield program, address
    program.stop(5.0)


def test_it_serves_and_drains(draft: tuple[Program, str], caplog: pytest.LogCaptureFixture) -> None:
    program, address = draft
    probe = WorkerProbe("draft", address, Config())
    with caplog.at_level(logging.INFO, logger="ray.serve.outrider"):
        assert "does not answer" in str(probe.problem())
        assert eventually(lambda: probe.problem() is None, 60)
        assert program.end() is None
        facts = probe.facts()
        program.stop(30.0)
    assert facts.fingerprint
    assert facts.load is not None
    assert program.end() == "the draft ended with code 0"
    assert any("serving speculation.v1.Draft" in record.message for record in caplog.records)


def test_one_that_was_killed_says_so(draft: tuple[Program, str]) -> None:
    program, _ = draft
    os.kill(program.pid, 9)
    assert eventually(lambda: program.end() is not None)
    assert program.end() == "the draft was ended by SIGKILL"


def test_a_setting_that_cannot_work_is_named() -> None:
    program = Program("draft", ["draft", "--set", "draft.model=/nowhere", "--set", "draft.listen=127.0.0.1:0"], {})
    program.start()
    assert eventually(lambda: program.end() is not None, 60)
    end = program.end()
    assert end is not None
    assert end.startswith("the draft cannot start: outrider draft:")
    assert "/nowhere" in end
    assert "\n" not in end


def test_a_log_in_json_is_read_as_well(caplog: pytest.LogCaptureFixture) -> None:
    arguments = ["draft", "--log-format", "json", "--set", "draft.model=/nowhere", "--set", "draft.listen=127.0.0.1:0"]
    program = Program("draft", arguments, {})
    with caplog.at_level(logging.INFO, logger="ray.serve.outrider"):
        program.start()
        assert eventually(lambda: program.end() is not None, 60)
    end = program.end()
    assert end is not None
    assert end.startswith("the draft cannot start: draft: ")
    assert "/nowhere" in end
    (record,) = (record for record in caplog.records if record.name == "ray.serve.outrider")
    assert "/nowhere" in json.loads(record.message)["message"]


def test_it_ends_with_the_process_that_started_it() -> None:
    script = """if True:
        import os, time
        from services.launch.ray.program import Program
        program = Program("draft", ["draft", "--set", "draft.listen=127.0.0.1:0"], {})
        program.start()
        print(program.pid, flush=True)
        time.sleep(600)
    """
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    assert eventually(lambda: not os.path.exists(f"/proc/{pid}") or _is_zombie(pid))


def _is_zombie(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "Z"
