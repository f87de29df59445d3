"""A run of `tests.system.fuzz_grpc`; long in `make soak`; `python -m tests.system.fuzz_grpc` takes a seed."""

from __future__ import annotations

import pytest

from tests.soak import length
from tests.system.fuzz_grpc import run

SECONDS = length(5.0, 240.0)


def test_bad_grpc_changes_nothing_for_others(capfd: pytest.CaptureFixture[str]) -> None:
    figures, _ = run(SECONDS, 2026)
    assert not figures.failures, "\n".join(figures.failures[:10])
    assert figures.did.total() > length(5, 400)
    assert figures.num_steady > 0
    log = capfd.readouterr().err
    # Not any traceback: gRPC logs one of its own where a peer goes while a message to it is under way.
    for broken in ("raised by servicer method", "loop ended", "never retrieved", "could not be"):
        assert broken not in log
