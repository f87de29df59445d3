"""Runs of `tests.system.fuzz_grpc`; long in `make soak`; `python -m tests.system.fuzz_grpc` takes a seed."""

from __future__ import annotations

import re

import pytest

from tests.soak import length
from tests.system.fuzz_grpc import run, run_servers

SECONDS = length(5.0, 240.0)
MAX_LOG_LINES_PER_SECOND = 25  # warnings and errors, of a target and a router with seven hostile workers
# Not any traceback: gRPC logs one of its own where a peer goes while a message to it is under way.
BROKEN = ("raised by servicer method", "loop ended", "never retrieved", "could not be")


def test_bad_grpc_changes_nothing_for_others(capfd: pytest.CaptureFixture[str]) -> None:
    figures, _ = run(SECONDS, 2026)
    assert not figures.failures, "\n".join(figures.failures[:10])
    assert figures.did.total() > length(5, 400)
    assert figures.num_steady > 0
    log = capfd.readouterr().err
    for broken in BROKEN:
        assert broken not in log


def test_hostile_workers_change_nothing_for_others(capfd: pytest.CaptureFixture[str]) -> None:
    figures, _ = run_servers(SECONDS, 2026)
    assert not figures.failures, "\n".join(figures.failures[:10])
    assert figures.did.total() > length(20, 400)
    assert figures.answers["ask: 200"] > 0
    log = capfd.readouterr().err
    for broken in (*BROKEN, "Traceback"):
        assert broken not in log
    lines = re.findall(r"^[0-9:]+ (?:WARNING|ERROR) .*", log, re.MULTILINE)
    assert len(lines) < MAX_LOG_LINES_PER_SECOND * SECONDS
    assert max(map(len, log.splitlines())) < 1000
