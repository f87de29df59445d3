"""A run of `tests.system.fuzz_http`; long in `make soak`; `python -m tests.system.fuzz_http` takes a seed."""

from __future__ import annotations

import pytest

from tests.soak import length
from tests.system.fuzz_http import run

SECONDS = length(5.0, 240.0)


def test_bad_http_changes_nothing_for_others(capfd: pytest.CaptureFixture[str]) -> None:
    figures, _ = run(SECONDS, 2026)
    assert not figures.failures, "\n".join(figures.failures[:10])
    assert figures.did.total() > length(10, 2000)
    assert figures.num_steady > 0
    assert "Traceback" not in capfd.readouterr().err
