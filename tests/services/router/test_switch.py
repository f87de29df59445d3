"""Speculation is switched for all requests, none or a share of them, while the router runs."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator

import pytest
import uvicorn
from starlette.testclient import TestClient

from cluster.telemetry.metrics import RouterMetrics
from services import cli
from services.router.admin import create_admin_app
from services.router.switch import SpeculationSwitch
from tests.services.router.test_completions import metric
from tests.waiting import wait_until


@pytest.mark.parametrize(("percentage", "expected"), [(0, 0), (25, 50), (33.3, 66), (100, 200)])
def test_a_share_of_the_requests(percentage: float, expected: int) -> None:
    switch = SpeculationSwitch(percentage, RouterMetrics("m"))
    drawn = [switch.draw() for _ in range(200)]
    assert sum(drawn) == expected
    halves = sum(drawn[:100]), sum(drawn[100:])
    assert abs(halves[0] - halves[1]) <= 1


def test_a_request_that_may_not_has_k_0_whatever_it_asks_for(new_router, target) -> None:
    router = new_router([target.address], speculation_percentage=50)
    for _ in range(4):
        assert router.complete(prompt=[70], n=2, max_tokens=3, num_speculative_tokens=4).status_code == 200
    asked = [request.num_speculative_tokens for request in target.requests]
    assert asked == [0, 0, 4, 4, 0, 0, 4, 4]
    assert metric(router, "outrider_speculation_percentage") == 50
    page = router.client.get("/metrics").text
    for kind in ("on", "off"):
        assert f'outrider_decode_tokens_total{{model_name="{router.model}",speculation="{kind}"}} 8.0' in page


@pytest.fixture
def switch() -> SpeculationSwitch:
    return SpeculationSwitch(100, RouterMetrics("m"))


def test_the_admin_call(switch: SpeculationSwitch, caplog: pytest.LogCaptureFixture) -> None:
    client = TestClient(create_admin_app(switch))
    assert client.get("/admin/speculation").json() == {"percentage": 100}
    with caplog.at_level(logging.INFO):
        answer = client.put("/admin/speculation", json={"percentage": 12.5, "reason": "canary\nof k"})
    assert answer.json() == {"percentage": 12.5}
    assert switch.percentage == 12.5
    (line,) = [record.getMessage() for record in caplog.records if record.name == "outrider.audit"]
    assert line == "speculation for 12.5 % of requests, was 100 %; set by testclient, reason: 'canary\\nof k'"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "percentage"),
        ({"percentage": 101}, "percentage"),
        ({"percentage": "50"}, "percentage"),
        ({"percentage": 50, "mode": "on"}, "mode"),
        ({"percentage": 50, "reason": "x" * 501}, "reason"),
    ],
)
def test_a_call_that_is_wrong_changes_nothing(switch: SpeculationSwitch, body: dict[str, object], param: str) -> None:
    answer = TestClient(create_admin_app(switch)).put("/admin/speculation", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert switch.percentage == 100


@pytest.fixture
def admin(switch: SpeculationSwitch) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(create_admin_app(switch), log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    wait_until(lambda: server.started)
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join()


def test_the_command(admin: str, switch: SpeculationSwitch, capsys: pytest.CaptureFixture[str]) -> None:
    for share, percentage in (("off", 0), ("25%", 25), ("on", 100)):
        assert cli.main(["speculation", share, "--admin", admin, "--reason", "try"]) == 0
        assert capsys.readouterr().out == f"{admin}: speculation for {percentage} % of requests\n"
        assert switch.percentage == percentage
    assert cli.main(["speculation", "--admin", admin]) == 0
    assert "100 %" in capsys.readouterr().out


def test_the_command_says_who_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["speculation", "off", "--admin", "127.0.0.1:9"]) == 2
    assert "127.0.0.1:9 does not answer" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["speculation", "120", "--admin", "127.0.0.1:9"])
