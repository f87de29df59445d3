"""Tests of the format of log lines, and that clients cannot inject lines of their own."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from cluster.telemetry.logs import read_line, setup_logging

HOSTILE = 'a\r\n12:00:00 ERROR router: forged\x1b[2J\x85\u2028"'

logger = logging.getLogger("tests.logs")


@pytest.fixture(autouse=True)
def _root() -> Iterator[None]:
    root, hook = logging.getLogger(), sys.excepthook
    handlers, level = list(root.handlers), root.level
    root.handlers.clear()
    yield
    root.handlers[:], sys.excepthook = handlers, hook
    root.setLevel(level)


def test_text_has_fields_after_the_message(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("router")
    fields = {"path": "/v1/completions", "seed": -3, "stream": True, "key": "a b", "reasons": {"stop": 2}, "eq": "a=b"}
    logger.info("request %d", 1, extra={"fields": fields})
    line = capsys.readouterr().err
    assert line[8:] == (
        ' INFO router: request 1 path=/v1/completions seed=-3 stream=true key="a b" reasons={"stop":2} eq="a=b"\n'
    )
    assert read_line(line.rstrip("\n")) == (logging.INFO, line[14:-1])


def test_json_is_an_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("target", "debug", "json")
    logger.debug("call %s", "begins", extra={"fields": {"request_id": "r", "prompt_tokens": 3}})
    (line,) = capsys.readouterr().err.splitlines()
    event = json.loads(line)
    assert event.pop("time")[10] == "T"
    assert event == {
        "level": "debug",
        "program": "target",
        "logger": "tests.logs",
        "message": "call begins",
        "request_id": "r",
        "prompt_tokens": 3,
    }
    assert line.startswith('{"time": "20')
    assert read_line(line) == (logging.DEBUG, "target: call begins")


@pytest.mark.parametrize("form", ["text", "json"])
def test_nobody_writes_lines_of_their_own(capsys: pytest.CaptureFixture[str], form: str) -> None:
    setup_logging("router", "info", form)  # type: ignore[arg-type]
    logger.warning("said %s", HOSTILE, extra={"fields": {"name": HOSTILE}})
    written = capsys.readouterr().err
    assert len(written.splitlines()) == 1
    assert written.endswith("\n")
    assert "\x1b" not in written
    if form == "json":
        assert json.loads(written)["name"] == HOSTILE


def test_an_exception_is_in_the_object(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("router", "info", "json")
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logger.exception("broken\n")
    (line,) = capsys.readouterr().err.splitlines()
    event = json.loads(line)
    assert event["message"] == "broken"
    assert event["exception"].startswith("Traceback")
    read = read_line(line)
    assert read is not None
    assert read.level == logging.ERROR


def test_what_ends_a_program_is_a_line_too() -> None:
    script = "from cluster.telemetry.logs import setup_logging; setup_logging('draft', 'info', 'json'); 1 / 0"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    event = json.loads(ended.stderr)
    assert (event["level"], event["program"]) == ("critical", "draft")
    assert read_line(ended.stderr.strip()) == (logging.CRITICAL, "draft: ZeroDivisionError: division by zero")


@pytest.mark.parametrize(
    "line",
    [
        "Traceback (most recent call last):",
        "{",
        '{"time": 1}',
        '{"time": "now", "level": "info"}',
        "[1]",
        "12:00 INFO x",
    ],
)
def test_other_lines_are_not_ours(line: str) -> None:
    assert read_line(line) is None
