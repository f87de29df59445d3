"""A short run of `tests.system.fuzz_http`; `python -m tests.system.fuzz_http --seconds 600` is a long one."""

from __future__ import annotations

import pytest

from tests.system.fuzz_http import run

SECONDS = 10.0


def test_bad_http_changes_nothing_for_others(capfd: pytest.CaptureFixture[str]) -> None:
    figures, _ = run(SECONDS, 2026)
    assert not figures.failures, "\n".join(figures.failures[:10])
    assert figures.did.total() > 100
    assert figures.num_steady > 0
    assert "Traceback" not in capfd.readouterr().err
