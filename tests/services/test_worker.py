from __future__ import annotations

import logging

import pytest

from services.worker import loading_progress


def test_progress_is_logged_once_a_second_and_at_the_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("services.worker.time.monotonic", lambda: now)
    progress = loading_progress("a model")
    with caplog.at_level(logging.INFO):
        for done in range(1, 9):
            now += 0.4
            progress(done, 8)
    assert caplog.messages == [f"loading a model: {percent} %" for percent in (37, 75, 100)]
