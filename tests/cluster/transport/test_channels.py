"""Channels and servers with certificates and a token: who gets through, and what the others are told. Real sockets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from cluster.config.tls import TlsConfig
from cluster.coordination.link import DraftLink
from cluster.errors import ConfigurationError
from cluster.telemetry.metrics_page import PageGuard, serve_metrics
from cluster.transport.certificates import Certificates
from cluster.transport.dialing import PLAIN, Dialer
from cluster.transport.listening import Listener
from services import cli
from tests.background_loop import BackgroundLoop
from tests.certificates import Certs
from tests.cluster.coordination.draft_server import FINGERPRINT, DraftServer
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certs:
    certs = Certs(tmp_path_factory.mktemp("tls"))
    certs.make_bad_ones()
    return certs


@pytest.fixture(scope="module")
def loop() -> Iterator[BackgroundLoop]:
    loop = BackgroundLoop()
    yield loop
    loop.stop()


@pytest.fixture
def serve(loop: BackgroundLoop) -> Iterator[Callable[[TlsConfig], str]]:
    """Starts a worker with nothing but the health service; returns its address."""
    servers: list[grpc.aio.Server] = []

    def start(tls: TlsConfig) -> str:
        async def begin() -> int:
            listener = Listener.of(tls, "target")
            server = listener.new_server()
            health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
            port = listener.open_port(server, "127.0.0.1:0")
            await server.start()
            servers.append(server)
            return port

        return f"127.0.0.1:{loop.run(begin())}"

    yield start
    for server in servers:
        loop.run(server.stop(None))


def check(dialer: Dialer, address: str) -> None:
    """Asks for health once. Raises grpc.RpcError."""
    with dialer.blocking_channel(address) as channel:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)


def refusal(dialer: Dialer, address: str) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as refused:
        check(dialer, address)
    return refused.value.code(), dialer.explain(refused.value) or ""


def test_who_has_certificate_and_token_gets_through(certs: Certs, serve) -> None:
    address = serve(certs.tls())
    dialer = Dialer.of(certs.tls(), "router")
    check(dialer, address)
    with dialer.blocking_channel(address) as channel:
        watched = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=5)
        assert next(watched).status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("method", ["Check", "Watch"])
def test_what_is_no_message_is_an_invalid_argument(serve, caplog: pytest.LogCaptureFixture, method: str) -> None:
    with PLAIN.blocking_channel(serve(TlsConfig())) as channel, pytest.raises(grpc.RpcError) as refused:
        next(channel.unary_stream(f"/grpc.health.v1.Health/{method}")(b"\xff\xff", timeout=5))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not caplog.records


def test_plaintext_is_refused_both_ways(certs: Certs, serve) -> None:
    assert refusal(PLAIN, serve(certs.tls()))[0] is grpc.StatusCode.UNAVAILABLE
    assert refusal(Dialer.of(certs.tls(), "router"), serve(TlsConfig()))[0] is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("file", "told"),
    [("elsewhere", "Hostname Verification"), ("expired", "has expired"), ("stranger", "issuer")],
)
def test_a_caller_takes_no_other_certificate(certs: Certs, serve, file: str, told: str) -> None:
    code, why = refusal(Dialer.of(certs.tls(), "router"), serve(certs.tls(file)))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert why.startswith("TLS fails")
    assert told in why


@pytest.mark.parametrize("file", ["expired", "stranger"])
def test_a_worker_takes_no_other_certificate(certs: Certs, serve, file: str) -> None:
    code, why = refusal(Dialer.of(certs.tls(file), "router"), serve(certs.tls()))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert why


def test_a_caller_without_a_certificate_is_refused(certs: Certs, serve) -> None:
    """Who knows the authority, and would speak TLS."""
    address = serve(certs.tls())
    credentials = grpc.ssl_channel_credentials((certs.folder / "ca.crt").read_bytes())
    with grpc.secure_channel(address, credentials) as channel, pytest.raises(grpc.RpcError) as refused:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_name_of_its_own_stands_for_an_address_that_is_not_in_the_certificate(certs: Certs, serve) -> None:
    address = serve(certs.tls("elsewhere"))
    check(Dialer.of(certs.tls(), "router", "elsewhere.example"), address)
    assert "Hostname Verification" in refusal(Dialer.of(certs.tls(), "router", "outrider-target"), address)[1]


@pytest.mark.parametrize(("token", "told"), [("another", "not this worker's"), (None, "there is no token")])
def test_another_token_or_none_is_refused_for_every_method(certs: Certs, serve, token, told, caplog) -> None:
    address = serve(certs.tls())
    tls = certs.tls(token_file=None) if token is None else certs.tls(token=token)
    dialer = Dialer.of(tls, "router")
    code, why = refusal(dialer, address)
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert told in why
    with dialer.blocking_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
            next(stub.Watch(health_pb2.HealthCheckRequest(), timeout=5))
        with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
            next(channel.stream_stream("/speculation.v1.Draft/Speculate")(iter([b""]), timeout=5))
    lines = [record.getMessage() for record in caplog.records if record.name == "outrider.audit"]
    assert len(lines) == 3
    assert lines[0].startswith("audit: refused UNAUTHENTICATED: '/grpc.health.v1.Health/Check' from ipv4:127.0.0.1:")
    assert not any("0123456789abcdef" in line for line in lines)


def test_tokens_and_certificates_are_followed_on_both_sides(certs: Certs, serve) -> None:
    certs.copy("target", "changing")
    tls = certs.tls("changing", token="changing")
    address, dialer = serve(tls), Dialer.of(tls, "router")
    check(dialer, address)
    version = dialer.version
    token_file = Path(tls.token_file or "")
    token_file.write_text("new-0123456789abcdef\n")
    check(dialer, address)  # both read it
    certs.copy("expired", "changing")
    assert dialer.version == version + 1
    assert "has expired" in refusal(dialer, address)[1]
    certs.copy("target", "changing")
    check(dialer, address)
    (certs.folder / "changing.key").write_bytes((certs.folder / "router.key").read_bytes())  # does not fit
    token_file.write_text("short\n")
    check(dialer, address)  # with what they had


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"ca_file": "ca"}, "certificate_file, key_file"),
        ({"token_file": "token"}, "needs TLS"),
        ({"ca_file": "a", "certificate_file": "b"}, "key_file"),
    ],
)
def test_half_a_section_is_refused(settings: dict[str, str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        TlsConfig.model_validate(settings)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"ca_file": "/nowhere/ca.crt"}, r"tls\.ca_file: cannot read /nowhere/ca.crt"),
        ({"key_file": "router.key"}, r"tls\.certificate_file: .* cannot be used"),
        ({"ca_file": "token"}, r"tls\.ca_file: .* has no certificate"),
    ],
)
def test_files_that_cannot_work_are_named_at_the_start(certs: Certs, change: dict[str, str], complaint: str) -> None:
    ((setting, file),) = change.items()
    tls = certs.tls().model_copy(update={setting: file if file.startswith("/") else f"{certs.folder}/{file}"})
    with pytest.raises(ConfigurationError, match=complaint):
        Certificates(tls.of("target"))


@pytest.fixture
def new_link(loop: BackgroundLoop) -> Iterator[Callable[[str, TlsConfig], DraftLink]]:
    running = []

    def start(address: str, tls: TlsConfig) -> DraftLink:
        link = DraftLink(address, FINGERPRINT, lambda _: None, dialer=Dialer.of(tls, "target"))
        running.append(loop.start(link.run()))
        return link

    yield start
    for one in running:
        one.cancel()


def test_a_link_comes_up_when_the_draft_worker_has_a_certificate_again(
    certs: Certs, loop: BackgroundLoop, new_link, caplog
) -> None:
    certs.copy("expired", "drafts")
    server = DraftServer(loop, listener=Listener.of(certs.tls("drafts"), "draft"))
    link = new_link(server.address, certs.tls())
    wait_until(lambda: "has expired" in caplog.text)
    assert not link.is_up
    certs.copy("draft", "drafts")
    wait_until(lambda: link.is_up)
    assert sum("TLS fails" in record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR) == 1
    server.stop()


def test_a_link_comes_up_when_the_target_has_a_certificate_again(certs: Certs, loop: BackgroundLoop, new_link) -> None:
    certs.copy("expired", "targets")
    server = DraftServer(loop, listener=Listener.of(certs.tls(), "draft"))
    link = new_link(server.address, certs.tls("targets"))
    certs.copy("target", "targets")
    wait_until(lambda: link.is_up)
    server.stop()


@pytest.mark.parametrize(("file", "told"), [("elsewhere", "Hostname Verification"), ("stranger", "issuer")])
def test_a_link_to_another_than_was_meant_stays_down(
    certs: Certs, loop: BackgroundLoop, new_link, caplog, file: str, told: str
) -> None:
    server = DraftServer(loop, listener=Listener.of(certs.tls(file), "draft"))
    link = new_link(server.address, certs.tls())
    wait_until(lambda: told in caplog.text)
    assert not link.is_up
    assert server.num_streams_ever == 0
    server.stop()


def test_a_link_with_another_token_is_refused(certs: Certs, loop: BackgroundLoop, new_link, caplog) -> None:
    server = DraftServer(loop, listener=Listener.of(certs.tls(), "draft"))
    link = new_link(server.address, certs.tls(token="foreign"))
    wait_until(lambda: "it refuses our certificate or token: the token is not this worker's" in caplog.text)
    assert not link.is_up
    server.stop()


def test_a_metrics_page_wants_a_certificate_and_a_token(certs: Certs, tmp_path: Path, caplog) -> None:
    token = tmp_path / "token"
    token.write_text("scrape-0123456789abcdef\n")
    guard = PageGuard.of(Listener.of(certs.tls(), "target"), str(token))
    port = serve_metrics(CollectorRegistry(), "127.0.0.1", 0, guard)
    url, own = f"https://127.0.0.1:{port}/metrics", certs.context("client")
    shared = (certs.folder / "token").read_text().strip()
    for known in ("scrape-0123456789abcdef", shared):
        headers = {"authorization": f"Bearer {known}"}
        assert httpx.get(url, verify=own, headers=headers).status_code == 200
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": b"Bearer \xe9"}):
        refused = httpx.get(url, verify=own, headers=headers)
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
    with pytest.raises(httpx.TransportError):
        httpx.get(url, verify=certs.context())
    with pytest.raises(httpx.TransportError):
        httpx.get(url.replace("https", "http"))
    wait_until(lambda: caplog.text.count("TLS fails") == 2)


def test_outrider_health_asks_as_a_program_would(certs: Certs, serve, tmp_path: Path, capsys) -> None:
    address = serve(certs.tls())
    config = tmp_path / "cluster.yaml"
    config.write_text(f"tls: {certs.tls().model_dump_json()}")
    assert cli.main(["health", address, "--config", str(config)]) == 0
    assert cli.main(["health", address]) == 2
    assert cli.main(["health", address, "--config", str(config), "--server-name", "elsewhere.example"]) == 2
    assert "Hostname Verification" in capsys.readouterr().err
