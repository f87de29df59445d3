"""A router with certificates: towards its targets, and towards its clients. Real sockets."""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Callable, Iterator

import httpx
import pytest

from cluster.config.router import RouterConfig
from cluster.config.tls import TlsConfig
from cluster.errors import ConfigurationError
from cluster.transport.listening import Listener
from services import cli
from services.http_call import pinned_context
from services.launch.local import free_ports
from services.router.http.certificate import HttpsCertificate
from tests.certificates import Certs
from tests.services.router.conftest import ScriptedTarget
from tests.services.router.test_router_program import program
from tests.waiting import WAIT_S, wait_until


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certs:
    certs = Certs(tmp_path_factory.mktemp("tls"))
    certs.make_bad_ones()
    return certs


@pytest.fixture
def new_secure_target(background, tokenizer) -> Iterator[Callable[[TlsConfig], ScriptedTarget]]:
    targets: list[ScriptedTarget] = []

    def start(tls: TlsConfig) -> ScriptedTarget:
        target = ScriptedTarget(tokenizer, Listener.of(tls, "target"))
        background.run(target.start())
        targets.append(target)
        return target

    yield start
    for target in targets:
        background.run(target.stop())


def problem_of(router) -> str:
    (entry,) = router.client.get("/health").json()["targets"]
    return str(entry["problem"])


def test_router_and_target_know_each_other(new_router, new_secure_target, certs: Certs) -> None:
    target = new_secure_target(certs.tls())
    router = new_router([target.address], tls=certs.tls())
    assert router.complete(prompt=[70], max_tokens=3).status_code == 200


@pytest.mark.parametrize(
    ("targets", "routers", "told"),
    [
        ({"file": "elsewhere"}, {}, "Hostname Verification"),
        ({"file": "expired"}, {}, "has expired"),
        ({"file": "stranger"}, {}, "issuer"),
        ({}, {"file": "stranger"}, "closes the connection"),
        ({}, {"file": "expired"}, "closes the connection"),
        ({}, {"token": "foreign"}, "the token is not this worker's"),
        ({}, {"token_file": None}, "there is no token"),
        ({}, None, "does not answer"),
        (None, {}, "does not answer"),
    ],
)
def test_a_target_that_does_not_know_the_router_or_is_another_is_not_used(
    new_router, new_secure_target, certs: Certs, targets, routers, told: str
) -> None:
    """None: without TLS at all."""
    target = new_secure_target(TlsConfig() if targets is None else certs.tls(**targets))
    router = new_router([target.address], tls=None if routers is None else certs.tls(**routers))
    assert told in problem_of(router)
    assert router.complete(prompt=[70], max_tokens=3).status_code == 503
    assert not target.requests


def test_a_target_may_be_known_by_another_name_than_is_dialled(new_router, new_secure_target, certs: Certs) -> None:
    target = new_secure_target(certs.tls("elsewhere"))
    router = new_router([target.address], tls=certs.tls(), server_name="elsewhere.example")
    assert router.complete(prompt=[70], max_tokens=3).status_code == 200


@pytest.mark.parametrize("side", ["target", "router"])
def test_new_certificates_need_no_restart(new_router, new_secure_target, certs: Certs, side: str) -> None:
    certs.copy("expired", "changing")
    target = new_secure_target(certs.tls("changing" if side == "target" else "target"))
    router = new_router([target.address], tls=certs.tls("changing" if side == "router" else "router"))
    assert problem_of(router) != "None"
    certs.copy(side, "changing")
    wait_until(lambda: problem_of(router) == "None")
    assert router.complete(prompt=[70], max_tokens=3).status_code == 200


@contextlib.contextmanager
def https_program(model_folder, target, certs: Certs, file: str = "router", **settings) -> Iterator[str]:
    """The URL of a router with TLS."""
    files = {"tls_certificate_file": f"{certs.folder}/{file}.crt", "tls_key_file": f"{certs.folder}/{file}.key"}
    verify = certs.context()
    verify.check_hostname = file != "elsewhere"
    with program(model_folder, target, verify=verify, **files, **settings) as (_, client):
        yield str(client.base_url).rstrip("/")


def test_clients_are_answered_over_https_and_in_plaintext_not_at_all(model_folder, target, certs: Certs) -> None:
    (port,) = free_ports(1)
    with https_program(model_folder, target, certs, admin_listen=f"127.0.0.1:{port}") as url:
        with httpx.Client(base_url=url, verify=certs.context(), trust_env=False) as client:
            body = {"prompt": [70], "max_tokens": 3, "stream": True}
            assert client.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
        for address in (url.removeprefix("https://"), f"127.0.0.1:{port}"):
            plain = http.client.HTTPConnection(address, timeout=WAIT_S)
            plain.request("GET", "/health")
            with pytest.raises((http.client.HTTPException, OSError)):
                plain.getresponse()
        ca = ["--ca-file", f"{certs.folder}/ca.crt"]
        assert cli.main(["speculation", "off", "--admin", f"https://127.0.0.1:{port}", *ca]) == 0
        assert cli.main(["health", url, *ca]) == 0
        own = ["--certificate", f"{certs.folder}/router.crt"]
        assert cli.main(["speculation", "on", "--admin", f"https://127.0.0.1:{port}", *own]) == 0
        assert cli.main(["health", url, "--certificate", f"{certs.folder}/target.crt"]) == 2
        assert cli.main(["health", url, "--certificate", f"{certs.folder}/token"]) == 2
        assert cli.main(["health", url]) == 2  # this machine knows nothing of the authority


def test_a_renewed_certificate_is_shown_to_new_connections(model_folder, target, certs: Certs) -> None:
    certs.copy("router", "public")

    def shown() -> bytes | None:
        with (
            socket.create_connection(("127.0.0.1", port)) as plain,
            certs.context().wrap_socket(plain, server_hostname="127.0.0.1") as connection,
        ):
            return connection.getpeercert(binary_form=True)

    with https_program(model_folder, target, certs, "public") as url:
        port = int(url.rpartition(":")[2])
        with httpx.Client(base_url=url, verify=certs.context(), trust_env=False) as old:
            assert old.get("/health").status_code == 200
            first = shown()
            (certs.folder / "public.crt").write_text("nothing")
            certs.copy("target", "public")
            wait_until(lambda: shown() != first)
            assert old.get("/health").status_code == 200


@pytest.mark.parametrize("settings", [{"tls_certificate_file": "a"}, {"tls_key_file": "a"}])
def test_a_certificate_without_its_key_is_refused(settings: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="set tls_certificate_file and tls_key_file"):
        RouterConfig.model_validate(settings)


def test_files_that_cannot_be_used_are_named(certs: Certs) -> None:
    with pytest.raises(ConfigurationError, match=r"router\.tls_certificate_file: /nowhere.crt .*No such file"):
        HttpsCertificate("/nowhere.crt", f"{certs.folder}/router.key")
    with pytest.raises(ConfigurationError, match="cannot be used"):
        HttpsCertificate(f"{certs.folder}/router.crt", f"{certs.folder}/target.key")


def test_a_launcher_knows_its_own_router_by_its_very_certificate(model_folder, target, certs: Certs) -> None:
    with https_program(model_folder, target, certs, "elsewhere") as url:
        own, other = (pinned_context(f"{certs.folder}/{file}.crt") for file in ("elsewhere", "router"))
        assert httpx.get(f"{url}/health", verify=own, trust_env=False).status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/health", verify=other, trust_env=False)
