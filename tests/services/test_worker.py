from __future__ import annotations

import logging

import grpc
import httpx
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster.config.workers import TargetConfig
from cluster.errors import ConfigurationError
from cluster.telemetry.metrics import Reading
from services.launch.child import Child
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


@pytest.mark.parametrize("is_on", [False, True])
def test_reflection_is_off_unless_it_is_asked_for(is_on: bool) -> None:
    """Tests the real program: without the setting, a worker does not list its services."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    settings = [f"draft.listen={address}", "draft.drafter=simulated", "target.engine=simulated"]
    settings.append(f"draft.reflection={str(is_on).lower()}")
    draft = Child("draft", ["draft", *(word for setting in settings for word in ("--set", setting))])
    draft.start()
    try:
        with grpc.insecure_channel(address) as channel:
            grpc.channel_ready_future(channel).result(60)
            asked = reflection_pb2.ServerReflectionRequest(list_services="")
            replies = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([asked]))
            if is_on:
                names = [service.name for service in next(replies).list_services_response.service]
                assert "speculation.v1.Draft" in names
            else:
                with pytest.raises(grpc.RpcError) as refused:
                    next(replies)
                assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    finally:
        draft.kill()


def test_without_a_port_there_is_no_metrics_page() -> None:
    serve_readings(TargetConfig(metrics_host="nowhere.invalid", metrics_port=None), list, "m")
