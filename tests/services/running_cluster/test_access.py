"""Who is told a secret when a cluster's pages are read: nobody who has only said where its page is."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter

from cluster.config import Config
from cluster.config.tls import TlsConfig
from cluster.errors import ConfigurationError
from cluster.telemetry.metrics_page import PageGuard, serve_metrics
from cluster.transport.listening import Listener
from services.http_call import API_KEY
from services.running_cluster.access import Access
from tests.certificates import Certs
from tests.http_server import AnsweringServer, HttpAnswer, answering

WORKER = "127.0.0.1:7000"
MakeThief = Callable[..., tuple[AnsweringServer, str]]


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certs:
    certs = Certs(tmp_path_factory.mktemp("tls"))
    certs.make_bad_ones()
    return certs


def token_file(folder: Path, name: str) -> str:
    (folder / name).write_text(f"{name}-0123456789abcdef\n")
    return str(folder / name)


def page_of(guard: PageGuard, scheme: str, host: str = "127.0.0.1") -> str:
    registry = CollectorRegistry()
    Counter("things", "Things.", registry=registry).inc(3)
    return f"{scheme}://{host}:{serve_metrics(registry, host, 0, guard)}/metrics"


def secured(certs: Certs, metrics_token_file: str | None = None) -> str:
    return page_of(PageGuard.of(Listener.of(certs.tls(), "target"), metrics_token_file), "https")


def access(tls: TlsConfig | None = None, named: str = "", **target: Any) -> Access:
    return Access.of(Config.model_validate({"tls": tls or TlsConfig(), "target": target}), None, {named})


@pytest.fixture
def thief() -> Iterator[MakeThief]:
    """Makes programs that keep what they are sent; returns each with the address of its page."""
    with ExitStack() as servers:

        def make(context: ssl.SSLContext | None = None) -> tuple[AnsweringServer, str]:
            server = servers.enter_context(answering(lambda request: HttpAnswer(status=401), context))
            return server, f"{server.url}/metrics"

        yield make


def authorizations(server: AnsweringServer) -> list[str | None]:
    return [request.headers["authorization"] for request in server.requests]


class TestWithCertificates:
    def test_a_page_is_read_with_the_shared_token(self, certs: Certs) -> None:
        page = access(certs.tls("client"), tls_server_name="outrider-target").target.read_page(secured(certs), WORKER)
        assert page.sum("things_total") == 3

    def test_or_with_that_of_its_pool(self, certs: Certs, tmp_path: Path) -> None:
        scraper = token_file(tmp_path, "scraper")
        tls = certs.tls("client", token_file=None)
        page = access(tls, metrics_token_file=scraper).target.read_page(secured(certs, scraper), WORKER)
        assert page.sum("things_total") == 3

    def test_without_a_token_it_is_said_where_one_goes(self, certs: Certs) -> None:
        with pytest.raises(ConfigurationError, match=r"requires a token: set target\.metrics_token_file"):
            access(certs.tls("client", token_file=None)).target.read_page(secured(certs), WORKER)

    def test_without_a_certificate_it_is_said_what_is_missing(self, certs: Certs) -> None:
        with pytest.raises(ConfigurationError, match=r"requires a certificate: set tls\.ca_file"):
            access().target.read_page(secured(certs), WORKER)

    @pytest.mark.parametrize("shown", ["stranger", "expired", "elsewhere"])
    def test_whoever_shows_another_certificate_is_sent_nothing(
        self, shown: str, certs: Certs, thief: MakeThief
    ) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certs.folder / f"{shown}.crt", certs.folder / f"{shown}.key")
        server, page = thief(context)
        with pytest.raises(ConfigurationError, match="CERTIFICATE_VERIFY_FAILED"):
            access(certs.tls("client")).target.read_page(page, WORKER)
        assert not server.requests

    def test_the_certificate_of_another_role_is_not_taken(self, certs: Certs, thief: MakeThief) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certs.folder / "draft.crt", certs.folder / "draft.key")
        server, page = thief(context)
        with pytest.raises(ConfigurationError, match="CERTIFICATE_VERIFY_FAILED"):
            access(certs.tls("client"), tls_server_name="outrider-target").target.read_page(page, WORKER)
        assert not server.requests

    def test_no_page_in_plaintext_is_read(self, certs: Certs, thief: MakeThief) -> None:
        server, page = thief()
        with pytest.raises(ConfigurationError, match="is in plaintext"):
            access(certs.tls("client"), named=page).target.read_page(page, WORKER)
        assert not server.requests


class TestWithoutCertificates:
    def test_the_token_goes_to_pages_that_the_operator_named(self, tmp_path: Path) -> None:
        scraper = token_file(tmp_path, "scraper")
        url = page_of(PageGuard.of(Listener(), scraper), "http")
        page = access(named=url, metrics_token_file=scraper).target.read_page(url, WORKER)
        assert page.sum("things_total") == 3

    def test_and_to_no_other(self, tmp_path: Path, thief: MakeThief) -> None:
        server, page = thief()
        reader = access(named="http://127.0.0.1:1/metrics", metrics_token_file=token_file(tmp_path, "scraper")).target
        with pytest.raises(ConfigurationError, match=f"--metrics-page {page}"):
            reader.read_page(page, WORKER)
        assert authorizations(server) == [None]

    def test_the_routers_page_gets_its_own_token_or_the_key(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        thief: MakeThief,
    ) -> None:
        server, _ = thief()
        monkeypatch.setenv(API_KEY, "sk-key")
        scraper = token_file(tmp_path, "scraper")
        for router in ({}, {"metrics_token_file": scraper}):
            with pytest.raises(ConfigurationError, match="requires another token: set OUTRIDER_API_KEY"):
                Access.of(Config.model_validate({"router": router})).router.read_page(server.url)
        assert authorizations(server) == ["Bearer sk-key", "Bearer scraper-0123456789abcdef"]


def test_a_page_at_all_addresses_of_a_host_is_asked_for_where_its_worker_is() -> None:
    url = page_of(PageGuard(), "http", "0.0.0.0")
    assert access().target.read_page(url, WORKER).sum("things_total") == 3
    with pytest.raises(ConfigurationError, match=r"'http://192\.0\.2\.1\.invalid:"):
        access().target.read_page(url, "192.0.2.1.invalid:7000")


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/hostname",
        "http://127.0.0.1:8001/admin/speculation",
        "http://127.0.0.1:8001/metrics?format=json",
        "http://somebody@127.0.0.1:8001/metrics",
        "http://[127.0.0.1/metrics",
        "http://127.0.0.1:port/metrics",
    ],
)
def test_what_is_no_metrics_page_is_not_asked_for(url: str) -> None:
    with pytest.raises(ConfigurationError, match="is not http"):
        access().target.read_page(url, WORKER)
