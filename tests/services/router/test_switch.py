"""Speculation is switched for all requests, none or a share of them, while the router runs."""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
from collections.abc import Iterator

import pytest
import uvicorn
from starlette.testclient import TestClient

from services import cli
from services.router.metrics import RouterMetrics
from services.router.operators.admin import create_admin_app
from services.router.operators.switch import SpeculationSwitch
from tests.services.router.test_completions import metric
from tests.waiting import wait_until


@pytest.mark.parametrize("percentage", [0, 25, 99, 100])
def test_a_share_of_the_requests(percentage: float) -> None:
    """Fails by chance once in some million runs: 5 standard deviations of the binomial distribution."""
    switch, num_draws, share = SpeculationSwitch(percentage, RouterMetrics("m")), 4000, percentage / 100
    drawn = sum(switch.draw() for _ in range(num_draws))
    assert abs(drawn - num_draws * share) <= 5 * math.sqrt(num_draws * share * (1 - share))


def test_a_request_that_may_not_has_k_0_whatever_it_asks_for(new_router, target) -> None:
    router = new_router([target.address], speculation_percentage=50)
    for _ in range(20):
        assert router.complete(prompt=[70], n=2, max_tokens=3, num_speculative_tokens=4).status_code == 200
    asked = [request.num_speculative_tokens for request in target.requests]
    assert asked[::2] == asked[1::2]  # of one request
    assert {*asked} == {0, 4}
    assert metric(router, "outrider_speculation_percentage") == 50
    page = router.client.get("/metrics").text
    for kind, k in (("on", 4), ("off", 0)):
        num_tokens = 2.0 * asked.count(k)  # after the first of each
        assert f'outrider_decode_tokens_total{{model_name="{router.model}",speculation="{kind}"}} {num_tokens}' in page


@pytest.fixture
def switch() -> SpeculationSwitch:
    return SpeculationSwitch(100, RouterMetrics("m"))


def test_the_admin_call(switch: SpeculationSwitch, caplog: pytest.LogCaptureFixture) -> None:
    client = TestClient(create_admin_app(switch, RouterMetrics("m")))
    assert client.get("/admin/speculation").json() == {"percentage": 100}
    caplog.clear()
    with caplog.at_level(logging.INFO):
        answer = client.put("/admin/speculation", json={"percentage": 12.5, "reason": "canary\nof k"})
    assert answer.json() == {"percentage": 12.5}
    assert switch.percentage == 12.5
    line, call = [record.getMessage() for record in caplog.records if record.name == "outrider.audit"]
    assert call == "audit: answered 200: PUT '/admin/speculation' from 'testclient', key 'none'"
    assert line == "audit: speculation for 12.5 % of requests, was 100 %; set by 'testclient', reason: 'canary\\nof k'"


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
    answer = TestClient(create_admin_app(switch, RouterMetrics("m"))).put("/admin/speculation", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert switch.percentage == 100


def _http(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


@contextlib.contextmanager
def _answering(answer: bytes) -> Iterator[str]:
    """A server of one call, which answers whatever it is asked."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


@pytest.fixture
def admin(switch: SpeculationSwitch) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(create_admin_app(switch, RouterMetrics("m")), log_config=None, lifespan="off")
    )
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


@pytest.mark.parametrize(
    "answer", [b"", b"SSH-2.0-x\r\n", *map(_http, (b"[1]", b'"x"', b'{"percentage":null}', b"[" * 60_000))]
)
def test_the_command_takes_no_other_answer(answer: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with _answering(answer) as address:
        assert cli.main(["speculation", "--admin", address]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("address", ["127.0.0.1:9", "127.0.0.1:99999", "127.0.0.1:x", "nowhere", "a b:1", "[::1"])
@pytest.mark.parametrize("command", ["speculation", "health"])
def test_the_commands_say_who_does_not_answer(
    command: str, address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    for given in ([address], [f"http://{address}"]) if command == "health" else (["off", "--admin", address],):
        assert cli.main([command, *given]) == 2
        said = capsys.readouterr().err.splitlines()
        (line,) = [line for line in said if line.startswith(f"outrider {command}: ")]  # other routers may log meanwhile
        assert address in line


def test_the_switch_takes_no_share_beyond_all() -> None:
    with pytest.raises(SystemExit):
        cli.main(["speculation", "120", "--admin", "127.0.0.1:9"])
