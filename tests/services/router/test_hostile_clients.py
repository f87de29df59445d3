"""Tests of hostile clients, which send half of a message or too much, or read nothing. Others must not suffer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.config.router import RouterConfig
from services.launch.local import free_ports
from services.router.http import protocol
from services.router.http.connections import Connections
from services.router.http.json_values import parse_json
from services.router.http.protocol import MAX_HEADER_BYTES, MAX_HEADERS
from tests.background_loop import BackgroundLoop
from tests.certificates import Certs
from tests.waiting import WAIT_S, wait_until

from .conftest import Router, ScriptedTarget
from .test_router_program import program

PATH = "/v1/completions"
BODY = json.dumps({"prompt": [70, 71], "max_tokens": 2}).encode()
GET = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"

NewRouter = Callable[..., Router]


def head(length: int | None = len(BODY), *headers: bytes, path: str = PATH) -> bytes:
    lines = [f"POST {path} HTTP/1.1".encode(), b"host: localhost", b"content-type: application/json", *headers]
    if length is not None:
        lines.append(b"content-length: %d" % length)
    return b"\r\n".join(lines) + b"\r\n\r\n"


def connect(router: Router) -> socket.socket:
    host, _, port = router.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def everything(connection: socket.socket) -> bytes:
    """Returns all bytes that come until the router closes the connection."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(65_536):
            received += piece
    return received


def answer(connection: socket.socket) -> tuple[int, bytes]:
    """The status and the body of one answer."""
    received = b""
    while b"\r\n\r\n" not in received:
        piece = connection.recv(65_536)
        assert piece, received
        received += piece
    headers, _, body = received.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", headers)
    assert length is not None
    while len(body) < int(length[1]):
        body += connection.recv(65_536)
    return int(headers.split()[1]), body


def reading(router: Router, name: str) -> float:
    """0 where there is none yet."""
    page = router.client.get("/metrics").text
    return next((float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(name)), 0.0)


def num_closed(router: Router, reason: str) -> float:
    return reading(router, f'outrider_http_connections_closed_total{{reason="{reason}"}}')


@pytest.fixture
def router(new_router: NewRouter, target: ScriptedTarget) -> Router:
    return new_router([target.address], header_timeout_seconds=0.3, body_timeout_seconds=0.5)


def test_a_request_counts_when_its_body_is_whole(new_router: NewRouter, target: ScriptedTarget) -> None:
    router = new_router([target.address], max_waiting_requests=2)
    with contextlib.ExitStack() as stack:
        unfinished = [stack.enter_context(connect(router)) for _ in range(8)]
        for connection in unfinished:
            connection.sendall(head() + BODY[:5])
        time.sleep(0.1)
        assert reading(router, "vllm:num_requests_running") == 0
        assert router.complete(prompt=[70], max_tokens=2).status_code == 200
        unfinished[0].sendall(BODY[5:])
        assert answer(unfinished[0])[0] == 200


def test_a_full_router_says_so_before_the_body(new_router: NewRouter, target: ScriptedTarget) -> None:
    target.hang_after = 1
    router = new_router([target.address], max_waiting_requests=1)
    with router.client.stream("POST", PATH, json={"prompt": [70], "stream": True, "max_tokens": 9}) as stream:
        lines = stream.iter_lines()  # which ends the stream when it is thrown away
        next(lines)
        with connect(router) as connection:
            connection.sendall(head(8_000_000))
            received = everything(connection)
        assert received.startswith(b"HTTP/1.1 503 ")
        assert b"connection: close" in received
        assert b"retry-after: 1" in received


def test_an_early_refusal_reaches_who_is_still_sending(router: Router) -> None:
    with connect(router) as connection:
        connection.sendall(head(100_000_000, path="/v1/nothing"))
        with contextlib.suppress(ConnectionError):
            for _ in range(16):
                connection.sendall(b"x" * 65_536)
        assert everything(connection).startswith(b"HTTP/1.1 404 ")


@pytest.mark.parametrize("start", [b"", b"P", head()[:-4], b"\r\n", GET + b"GET /x"], ids=repr)
def test_headers_have_a_deadline(router: Router, start: bytes) -> None:
    with connect(router) as connection:
        connection.sendall(start)
        received = everything(connection)
    assert (b"HTTP/1.1 408 " in received) is (start not in (b"", b"\r\n"))
    assert num_closed(router, "header_timeout") == 1


def test_headers_that_come_bit_by_bit_are_late_too(router: Router) -> None:
    with connect(router) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionError):
            until = time.monotonic() + 10
            while time.monotonic() < until and not num_closed(router, "header_timeout"):
                connection.sendall(b"a: b\r\n")
                time.sleep(0.05)
        assert everything(connection).startswith(b"HTTP/1.1 408 ")
    assert num_closed(router, "header_timeout") == 1


def test_a_body_has_a_deadline(router: Router) -> None:
    with connect(router) as connection:
        connection.sendall(head() + BODY[:5])
        received = everything(connection)
    assert received.startswith(b"HTTP/1.1 408 ")
    assert b"did not arrive within 0.5 s" in received
    assert reading(router, f'outrider_requests_total{{code="408",model_name="{router.model}"') == 1


def test_who_leaves_within_his_body_is_counted_as_gone(router: Router) -> None:
    with connect(router) as connection:
        connection.sendall(head() + BODY[:5])
    wait_until(lambda: reading(router, f'outrider_requests_total{{code="499",model_name="{router.model}"') == 1)


def test_idle_connections_are_closed(new_router: NewRouter, target: ScriptedTarget) -> None:
    router = new_router([target.address], idle_timeout_seconds=0.2, header_timeout_seconds=60)
    with connect(router) as connection:
        connection.sendall(GET)
        assert answer(connection)[0] == 200
        assert connection.recv(1) == b""


def test_line_ends_between_requests_keep_no_connection(new_router: NewRouter, target: ScriptedTarget) -> None:
    router = new_router([target.address], header_timeout_seconds=0.2, idle_timeout_seconds=0.2)
    with connect(router) as connection:
        connection.sendall(GET)
        assert answer(connection)[0] == 200
        connection.sendall(b"\r\n")
        assert connection.recv(1) == b""


@pytest.mark.parametrize(
    "content",
    [
        b"GET / HTTP/1.1\r\n" + b"a: " + b"b" * 20_000_000,
        b"GET /" + b"a" * 20_000_000,
        b"GET / HTTP/1.1\r\n" + b"a" * 20_000_000,
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 3_000_000,
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * (MAX_HEADERS + 1) + b"\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: " + b"b" * MAX_HEADER_BYTES + b"\r\n\r\n",
        head(None, b"transfer-encoding: chunked") + b"1;" + b"a" * 20_000_000,
        head(None, b"transfer-encoding: chunked") + b"1\r\n{\r\n0\r\na: " + b"b" * 20_000_000,
    ],
    ids=["value", "url", "name", "many bytes", "many", "at once", "chunk extension", "trailer"],
)
def test_headers_without_end(router: Router, content: bytes) -> None:
    with connect(router) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(content)
        received = everything(connection)
    assert received.startswith(b"HTTP/1.1 431 ")
    assert router.complete(prompt=[70], max_tokens=2).status_code == 200


def test_a_trailer_is_no_header(new_router: NewRouter, target: ScriptedTarget) -> None:
    router = new_router([target.address])
    sent = head(None, b"transfer-encoding: chunked").replace(b"content-type: application/json", b"a: b")
    with connect(router) as connection:
        connection.sendall(sent + b"%x\r\n%b\r\n0\r\ncontent-type: application/json\r\n\r\n" % (len(BODY), BODY))
        assert answer(connection)[0] == 415


@pytest.mark.parametrize(
    "upgrade", [b"h2c", b"websocket", b"TLS/1.0, HTTP/1.1"], ids=lambda value: value.decode().partition("/")[0]
)
def test_whoever_asks_for_another_protocol_gets_this_one(router: Router, upgrade: bytes) -> None:
    asked = (
        b"connection: Upgrade, HTTP2-Settings",
        b"upgrade: " + upgrade,
        b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==",
        b"sec-websocket-version: 13",
    )
    with connect(router) as connection:
        for _ in range(2):
            connection.sendall(head(len(BODY), *asked) + BODY)
            status, body = answer(connection)
            assert status == 200, body
        connection.sendall(GET.replace(b"host: localhost", b"\r\n".join((b"host: localhost", *asked))) + GET)
        assert [answer(connection)[0]] == [200]


@pytest.mark.parametrize(
    "content",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT example:80 HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        head(5, b"content-length: 6") + b"123456",
        head(5, b"transfer-encoding: chunked") + b"0\r\n\r\n",
        head(None, b"transfer-encoding: chunked") + b"zz\r\n",
        head(None, b"content-length: " + b"9" * 5000),
        head(None, b"content-length: -1"),
    ],
    ids=lambda content: repr(content[:20]),
)
def test_what_is_no_http_is_a_400(router: Router, content: bytes) -> None:
    with connect(router) as connection:
        connection.sendall(content)
        assert everything(connection).startswith(b"HTTP/1.1 400 ")
    assert num_closed(router, "invalid") == 1


def test_what_has_been_refused_is_not_late_as_well(router: Router) -> None:
    with connect(router) as connection:
        connection.sendall(b"no HTTP\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 400"
        time.sleep(0.5)
        assert num_closed(router, "header_timeout") == 0


def test_a_few_requests_may_be_sent_ahead_and_no_more(router: Router) -> None:
    with connect(router) as connection:
        connection.sendall((head() + BODY) * 5)
        received = b""
        while received.count(b"HTTP/1.1 200 ") < 5:
            received += connection.recv(65_536)
    with connect(router) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall((head() + BODY) * 500)
        everything(connection)
    wait_until(lambda: reading(router, "vllm:num_requests_running") == 0)
    assert num_closed(router, "invalid") == 1


def test_who_leaves_ends_the_requests_that_were_sent_ahead(router: Router, target: ScriptedTarget) -> None:
    target.delay_s = 0.05
    streamed = json.dumps({"prompt": [70], "max_tokens": 190, "stream": True}).encode()
    with connect(router) as connection:
        connection.sendall((head(len(streamed)) + streamed) * 2)
        connection.recv(65_536)
    wait_until(lambda: reading(router, "vllm:num_requests_running") == 0)
    assert target.num_cancelled == 1


def test_connections_are_bounded_and_come_back(new_router: NewRouter, target: ScriptedTarget) -> None:
    router = new_router([target.address], max_connections=8)
    router.client.get("/health")  # has one of them
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(connect(router)) for _ in range(3)]
        wait_until(lambda: reading(router, "outrider_http_connections ") == 4)
        with connect(router) as connection:
            received = everything(connection)
        assert received.startswith(b"HTTP/1.1 503 ")
        assert num_closed(router, "address_full") == 1
        taken[0].sendall(GET)
        assert answer(taken[0])[0] == 200
    wait_until(lambda: reading(router, "outrider_http_connections ") == 1)


def test_an_address_has_its_share(router: Router) -> None:
    class Counts:
        def __init__(self) -> None:
            self.connections = self
            self.reasons: list[str] = []

        def inc(self) -> None: ...

        def dec(self) -> None: ...

        def count_closed_connection(self, reason: str) -> None:
            self.reasons.append(reason)

    counts = Counts()
    connections = Connections(RouterConfig(max_connections=6), counts)  # type: ignore[arg-type]
    assert [connections.enter(host) for host in ("10.0.0.1", "::ffff:10.0.0.1", "10.0.0.1")] == [True] * 3
    assert not connections.enter("10.0.0.1")
    connections.leave("10.0.0.1")
    assert [connections.enter(f"2001:db8::{number}") for number in range(4)] == [True, True, True, False]
    assert connections.enter("10.0.0.3")
    assert not connections.enter("10.0.0.4")
    connections.leave("10.0.0.1")
    assert connections.enter("2001:db8:0:1::1")
    assert counts.reasons == ["address_full", "address_full", "full"]


def test_bodies_are_bounded_all_together(
    new_router: NewRouter, target: ScriptedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.router.http.middleware._MAX_BODIES_BYTES", 100_000)
    router = new_router([target.address])
    with contextlib.ExitStack() as stack:
        large = [stack.enter_context(connect(router)) for _ in range(3)]
        for connection in large[:2]:
            connection.sendall(head(1_000_000) + b" " * 130_000)
        received = answer(large[1])
        assert received[0] == 503
        assert b"100000 bytes" in received[1]
        assert router.complete(prompt=[70], max_tokens=2).status_code == 200  # a small one needs no room
    wait_until(lambda: router.client.post(PATH, content=b" " * 160_000).status_code == 415)


@contextlib.contextmanager
def not_reading(router: Router) -> Iterator[socket.socket]:
    host, _, port = router.url.removeprefix("http://").partition(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        yield connection


# Log-probabilities of 20 likely tokens for each generated one make megabytes of a few tokens.
LARGE = {"prompt": [70], "max_tokens": 190, "n": 32, "logprobs": 20, "ignore_eos": True}


@pytest.mark.parametrize("stream", [True, False])
def test_who_does_not_read_holds_nothing(
    new_router: NewRouter, target: ScriptedTarget, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(protocol, "_WRITE_TIMEOUT_SECONDS", 0.3)
    target.tokens_per_reply = 10
    router = new_router([target.address])
    body = json.dumps(LARGE | {"stream": stream}).encode()
    with not_reading(router) as connection:
        connection.sendall(head(len(body)) + body)
        wait_until(lambda: num_closed(router, "write_timeout") == 1)
        wait_until(lambda: reading(router, "vllm:num_requests_running") == 0)
        wait_until(lambda: reading(router, "outrider_http_connections ") == 1)


def test_a_slow_reader_is_served(
    new_router: NewRouter, target: ScriptedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "_WRITE_TIMEOUT_SECONDS", 2.0)
    target.tokens_per_reply = 10
    router = new_router([target.address])
    body = json.dumps(LARGE).encode()
    with not_reading(router) as connection:
        connection.sendall(head(len(body), b"connection: close") + body)
        began_at, received = time.monotonic(), b""
        while piece := connection.recv(8192):
            received += piece
            time.sleep(0.02)
    assert received.endswith(b"}")
    assert time.monotonic() - began_at > 3  # some times the deadline
    assert num_closed(router, "write_timeout") == 0


def test_handshakes_are_counted_and_have_a_deadline(model_folder: Path, target: ScriptedTarget, tmp_path: Path) -> None:
    folder = Certs(tmp_path).folder
    settings: dict[str, Any] = {
        "tls_certificate_file": f"{folder}/router.crt",
        "tls_key_file": f"{folder}/router.key",
        "header_timeout_seconds": 0.5,
        "idle_timeout_seconds": 60.0,
        "max_connections": 6,
    }
    with program(model_folder, target, **settings) as (_, client), contextlib.ExitStack() as stack:
        router = Router(str(client.base_url), client, "")
        port = client.base_url.port
        assert port is not None
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)) for _ in range(2)]
        beyond = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=WAIT_S))
        assert everything(beyond) == b""
        assert num_closed(router, "address_full") == 1
        assert [everything(connection) for connection in silent] == [b"", b""]
        assert num_closed(router, "handshake") == 2
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with context.wrap_socket(socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)) as connection:
            connection.sendall(GET[:-2])
            assert everything(connection).startswith(b"HTTP/1.1 408 ")
        wait_until(lambda: reading(router, "outrider_http_connections ") == 1)


def test_half_a_body_keeps_no_router_from_ending(model_folder: Path, target: ScriptedTarget) -> None:
    with program(model_folder, target, drain_seconds=0) as (process, client):
        port = client.base_url.port
        assert port is not None
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as connection:
            connection.sendall(head() + BODY[:5])
            wait_until(lambda: reading(Router("", client, ""), "outrider_http_connections ") == 2)
            process.terminate()
            assert everything(connection).startswith(b"HTTP/1.1 503 ")
        _, stderr = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert "Traceback" not in stderr


def test_operators_have_deadlines_too(model_folder: Path, target: ScriptedTarget) -> None:
    (port,) = free_ports(1)
    settings: dict[str, Any] = {"admin_listen": f"127.0.0.1:{port}", "header_timeout_seconds": 0.3}
    with (
        program(model_folder, target, **settings),
        socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as connection,
    ):
        connection.sendall(GET[:-2])
        assert everything(connection).startswith(b"HTTP/1.1 408 ")


EMPTY = {"role": "user", "content": ""}
BODIES: dict[str, tuple[str, str]] = {
    "lists": (PATH, '{"prompt":"x","foo":[' + ",".join(["[[[]]]"] * 1_000_000) + "]}"),
    "numbers": (PATH, '{"prompt":[' + ",".join(["1"] * 4_000_000) + "]}"),
    "strings": (PATH, json.dumps({"prompt": "x", "stop": ["a"] * 1_000_000})),
    "messages": ("/v1/chat/completions", json.dumps({"messages": [EMPTY] * 200_000})),
    "items": ("/v1/responses", json.dumps({"input": [EMPTY] * 200_000})),
    "a message's": ("/v1/messages", json.dumps({"messages": [EMPTY] * 200_000, "max_tokens": 5})),
    "to tokenize": ("/tokenize", json.dumps({"messages": [EMPTY] * 200_000})),
    "arguments": (
        "/v1/chat/completions",
        json.dumps(
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "a", "arguments": f"[{'[],' * 2_000_000}[]]"}}],
                    }
                ]
            }
        ),
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_no_body_holds_up_the_event_loop(background: BackgroundLoop, shared: Router, name: str) -> None:
    path, content = BODIES[name]
    lateness = [0.0]  # in processor time of this process, which other work of the machine does not lengthen

    async def watch() -> None:
        while True:
            began_at = time.process_time()
            await asyncio.sleep(0.001)
            lateness.append(time.process_time() - began_at)

    watching = background.start(watch())
    answered = shared.client.post(path, content=content, headers={"content-type": "application/json"})
    watching.cancel()
    assert answered.status_code == 400
    assert "the limit is" in answered.text
    assert max(lateness) < 0.25  # SECURITY.md says what it is


@pytest.fixture
def shared(new_router: NewRouter, target: ScriptedTarget) -> Router:
    return new_router([target.address])


@pytest.mark.parametrize(
    ("path", "fields", "reason"),
    [
        ("/v1/chat/completions", {"messages": [EMPTY] * 4097}, "messages should have at most 4096 entries"),
        ("/tokenize", {"messages": [EMPTY] * 4097}, "messages should have at most 4096 entries"),
        ("/v1/responses", {"input": [EMPTY] * 4097}, "input should have at most 4096 items"),
        ("/v1/messages", {"messages": [EMPTY] * 4097, "max_tokens": 5}, "messages should have at most 4096 entries"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 1025}]},
            "messages[0].content should have at most 1024 entries",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a"}}] * 1025}]},
            "messages[0].tool_calls should have at most 1024 entries",
        ),
    ],
    ids=["messages", "tokenize", "items", "anthropic", "parts", "calls"],
)
def test_lists_of_a_chat_are_bounded(shared: Router, path: str, fields: dict[str, Any], reason: str) -> None:
    answered = shared.client.post(path, json=fields)
    assert answered.status_code == 400
    assert reason in answered.json()["error"]["message"]


def test_structure_within_strings_is_text(shared: Router) -> None:
    text = '[{"a\\\\": [1, 2, "\\""]}, ' * 50_000
    assert parse_json(json.dumps({"prompt": text}).encode()) == {"prompt": text}
    with pytest.raises(ValueError, match="lists and objects"):
        parse_json(b'["\\\\",' + b"[]," * 70_000 + b"1]")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (PATH, {"prompt": "x"}),
        (PATH, {"prompt": "x", "vllm_xargs": {}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"system": "x", "max_tokens": 5}),
    ],
    ids=["completion", "xargs", "message", "response", "anthropic"],
)
def test_unknown_fields_are_one_line(
    shared: Router, path: str, fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    unknown = {f"unknown{number:05}": 1 for number in range(60_000)}
    place = fields.get("vllm_xargs", fields)
    for message in fields.get("messages", []):
        message |= unknown
        place = message
    place |= unknown
    assert shared.client.post(path, json=fields).status_code in (200, 400)
    lines = [record.getMessage() for record in caplog.records if "unknown" in record.getMessage()]
    assert len(lines) == 1
    assert "'unknown00000', 'unknown00001'" in lines[0]
    assert lines[0].endswith("and 59995 more")
