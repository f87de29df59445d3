"""A metrics page serves few connections at once, and each for a limited time."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from cluster.telemetry import metrics_page
from cluster.telemetry.metrics_page import PageGuard, serve_metrics
from cluster.transport.listening import Listener
from tests.certificates import Certs
from tests.waiting import WAIT_S, eventually, wait_until

HALF_A_REQUEST = b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-A: "


def answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S).status_code == 200
    except httpx.TransportError:
        return False


def test_half_sent_requests_take_few_threads_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_page, "_CONNECTION_SECONDS", 3600.0)
    port = serve_metrics(CollectorRegistry(), "127.0.0.1", 0)
    num_threads = threading.active_count()
    with ExitStack() as stack:
        for _ in range(50):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=WAIT_S))
            connection.sendall(HALF_A_REQUEST)
        assert not answers(port)
        assert threading.active_count() <= num_threads + 2 * 16  # a connection has a thread and a timer
    assert eventually(lambda: answers(port))


def test_a_request_that_comes_byte_by_byte_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_page, "_CONNECTION_SECONDS", 0.3)
    port = serve_metrics(CollectorRegistry(), "127.0.0.1", 0)
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as connection:

        def is_open() -> bool:
            try:
                connection.sendall(b"x")
            except OSError:
                return False
            return True

        connection.sendall(HALF_A_REQUEST)
        wait_until(lambda: not is_open())
    assert answers(port)


def test_a_tls_connection_ends_in_time_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    certs = Certs(tmp_path)
    guard = PageGuard.of(Listener.of(certs.tls(token_file=None), "target"), None)
    monkeypatch.setattr(metrics_page, "_CONNECTION_SECONDS", 0.3)
    port = serve_metrics(CollectorRegistry(), "127.0.0.1", 0, guard)
    context = certs.context("router")
    context.check_hostname = False
    for wrap in (False, True):  # no handshake; half a request after it
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as plain:
            connection = context.wrap_socket(plain) if wrap else plain
            if wrap:
                connection.sendall(HALF_A_REQUEST)
            assert connection.recv(1) == b""
    assert "Traceback" not in capfd.readouterr().err
