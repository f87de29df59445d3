"""A whole cluster with certificates, a token and keys: the same tokens as without, and no way round."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.speculation.v1 import types_pb2
from services.cli import main
from services.http_call import API_KEY
from services.launch.local import LocalCluster, free_ports
from tests.certificates import Certs
from tests.system.cases import sampled_cases
from tests.system.client import complete, complete_all
from tests.system.conftest import PATIENT, READY_TIMEOUT_SECONDS, cluster_config
from tests.waiting import WAIT_S, wait_until

KEY = "sk-alice-0123456789abcdef"
SCRAPER = "scrape-0123456789abcdef"


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certs:
    return Certs(tmp_path_factory.mktemp("tls"))


def tls_settings(certs: Certs) -> list[str]:
    return [f"tls.{name}={path}" for name, path in certs.tls()]


@pytest.fixture(scope="module")
def secured(certs: Certs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("keys")
    (folder / "keys").write_text(f"alice:{KEY}\n")
    (folder / "scraper").write_text(f"{SCRAPER}\n")
    config = cluster_config(
        PATIENT,
        *tls_settings(certs),
        "target.tls_server_name=outrider-target",
        "draft.tls_server_name=outrider-draft",
        f"router.tls_certificate_file={certs.folder}/router.crt",
        f"router.tls_key_file={certs.folder}/router.key",
        f"router.api_keys_file={folder}/keys",
        f"router.admin_keys_file={folder}/keys",  # alice may know where workers are
        *(f"{section}.metrics_token_file={folder}/scraper" for section in ("router", "target", "draft")),
    )
    with LocalCluster(config) as running:
        running.wait_ready(READY_TIMEOUT_SECONDS)
        yield running


@pytest.fixture
def client(secured: LocalCluster, certs: Certs) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=secured.url, verify=certs.context(), headers=headers, timeout=WAIT_S) as client:
        yield client


def test_the_same_tokens_come_as_without(cluster: LocalCluster, secured: LocalCluster, client: httpx.Client) -> None:
    assert secured.url.startswith("https://")
    cases = sampled_cases(10)
    own = [complete(client, case, num_speculative_tokens=3) for case in cases]
    assert own == complete_all(cluster.url, cases, concurrency=1)
    page = client.get("/metrics").text
    accepted = [line for line in page.splitlines() if line.startswith("vllm:spec_decode_num_accepted_tokens_total")]
    assert float(accepted[0].rpartition(" ")[2]) > 0  # drafts came, over TLS
    assert 'outrider_requests_by_key_total{code="200",key="alice"}' in page


def test_the_official_client(secured: LocalCluster, certs: Certs) -> None:
    def ask(key: str) -> openai.types.Completion:
        with (
            httpx.Client(verify=certs.context()) as http_client,
            openai.OpenAI(base_url=f"{secured.url}/v1", api_key=key, max_retries=0, http_client=http_client) as client,
        ):
            return client.completions.create(model="outrider-target-12m", prompt="def main(", max_tokens=4)

    assert ask(KEY).usage is not None
    with pytest.raises(openai.AuthenticationError):
        ask("wrong")


def test_pages_of_all_programs_are_open_to_the_scraper_alone(secured: LocalCluster, certs: Certs) -> None:
    pages = [f"{secured.url}/metrics", secured.targets[0].metrics_url, secured.drafts[0].metrics_url]
    with httpx.Client(verify=certs.context("client")) as client:
        for page in pages:
            assert client.get(page, headers={"authorization": f"Bearer {SCRAPER}"}).status_code == 200, page
            assert client.get(page).status_code == 401, page


def test_an_operator_sees_its_numbers_in_the_terminal(
    secured: LocalCluster, certs: Certs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(API_KEY, KEY)
    files = (("ca", "ca.crt"), ("certificate", "client.crt"), ("key", "client.key"), ("token", "token"))
    settings = [f"--tls.{name}_file={certs.folder}/{file}" for name, file in files]
    names = [f"--{pool}.tls_server_name=outrider-{pool}" for pool in ("target", "draft")]
    top = ["top", "--url", secured.url, "--seconds", "0.2", "--once", "--ca-file", f"{certs.folder}/ca.crt"]
    assert main([*top, *settings, *names]) == 0
    shown = capsys.readouterr().out
    assert "target 127.0.0.1:" in shown
    assert "draft 127.0.0.1:" in shown
    assert main([*top, *names]) == 2  # without a certificate
    assert "no target of" in capsys.readouterr().err


def test_nobody_gets_past(secured: LocalCluster) -> None:
    for address in (*secured.config.target.addresses, *secured.config.draft.addresses):
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError):
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
    with socket.create_connection(("127.0.0.1", secured.config.router.port), timeout=WAIT_S) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert not plain.recv(100).startswith(b"HTTP")


def test_a_worker_answers_kubernetes_probes_beside(certs: Certs) -> None:
    """In plaintext and without a token, of health and nothing else."""
    ports = free_ports(2)
    settings = [
        *tls_settings(certs),
        f"draft.listen=127.0.0.1:{ports[0]}",
        f"draft.health_listen=127.0.0.1:{ports[1]}",
        "draft.drafter=simulated",
        "target.engine=simulated",
    ]
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    process = subprocess.Popen([sys.executable, "-m", "services.cli", "draft", *arguments])
    try:
        with grpc.insecure_channel(f"127.0.0.1:{ports[1]}") as channel:

            def status() -> int:
                try:
                    check = health_pb2_grpc.HealthStub(channel).Check
                    return int(check(health_pb2.HealthCheckRequest(), timeout=WAIT_S).status)
                except grpc.RpcError:
                    return -1

            wait_until(lambda: status() == health_pb2.HealthCheckResponse.SERVING)
            describe = channel.unary_unary(
                "/speculation.v1.Draft/Describe", request_serializer=types_pb2.DescribeRequest.SerializeToString
            )
            with pytest.raises(grpc.RpcError, match="UNIMPLEMENTED"):
                describe(types_pb2.DescribeRequest(), timeout=WAIT_S)
    finally:
        process.terminate()
        assert process.wait(timeout=WAIT_S) == 0
