from __future__ import annotations

import logging

import httpx
import pytest

from cluster.config.workers import TargetConfig
from cluster.errors import ConfigurationError
from cluster.telemetry.metrics import Reading
from services.launch.local import free_ports
from services.worker import loading_progress, serve_readings


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


def test_a_metrics_page_listens_where_it_is_told_to() -> None:
    (port,) = free_ports(1)
    worker = TargetConfig(metrics_host="127.0.0.2", metrics_port=port)
    serve_readings(worker, lambda: [Reading("outrider_answers", "Answers.", 42)], "m")
    assert "outrider_answers 42.0" in httpx.get(f"http://127.0.0.2:{port}/metrics").text
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/metrics")
    with pytest.raises(ConfigurationError, match=rf"127\.0\.0\.2:{port}: .*metrics_host"):
        serve_readings(worker, list, "m")


def test_without_a_port_there_is_no_metrics_page() -> None:
    serve_readings(TargetConfig(metrics_host="nowhere.invalid", metrics_port=None), list, "m")
