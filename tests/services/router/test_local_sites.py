"""Without keys on a loopback address, a browser's web sites can neither rebind a name to the router nor change it."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from starlette.testclient import TestClient

from cluster.config import Config
from services.router.access.gate import Credentials
from services.router.metrics import RouterMetrics
from services.router.operators.admin import create_admin_app
from services.router.operators.switch import SpeculationSwitch
from tests.waiting import WAIT_S

from .conftest import Router

PAYLOAD = {"prompt": [70], "max_tokens": 3}
EVIL = "https://evil.example"
FOREIGN_HOSTS = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "evil.example@localhost",
    "localhost@evil.example",
    "localhost:8000:9",
    "10.0.0.1",
    "0.0.0.0:8000",
    "[2001:db8::1]",
    "",
    "http://",
]
OWN_HOSTS = ["localhost", "LocalHost:8000", "127.0.0.1", "127.0.0.1:9", "127.1.2.3:8000", "[::1]", "[::1]:8000"]


def ask(router: Router, method: str, path: str, **headers: str) -> httpx.Response:
    body = PAYLOAD if method == "POST" else None
    return router.client.request(method, path, json=body, headers=headers)


def admin_client(**settings: Any) -> TestClient:
    config = Config.model_validate({"router": {"admin_listen": "127.0.0.1:8001", **settings}})
    metrics = RouterMetrics("m")
    app = create_admin_app(SpeculationSwitch(100, metrics), metrics, Credentials.of(config.router, {}))
    return TestClient(app, base_url="http://127.0.0.1:8001")


@pytest.mark.parametrize("host", FOREIGN_HOSTS)
def test_another_name_is_refused(shared_router: Router, host: str) -> None:
    for method, path in (
        ("GET", "/"),
        ("GET", "/page/events"),
        ("GET", "/health"),
        ("GET", "/metrics"),
        ("GET", "/nowhere"),
        ("POST", "/v1/completions"),
    ):
        refused = ask(shared_router, method, path, host=host)
        assert refused.status_code == 403, path
        assert refused.json()["error"]["type"] == "invalid_request_error"
        assert "router.allowed_hosts" in refused.json()["error"]["message"]
        assert refused.headers["x-request-id"]
    admin = admin_client()
    assert admin.get("/admin/speculation", headers={"host": host}).status_code == 403
    assert admin.put("/admin/speculation", json={"percentage": 5}, headers={"host": host}).status_code == 403


@pytest.mark.parametrize("host", OWN_HOSTS)
def test_a_name_of_this_machine_is_accepted(shared_router: Router, host: str) -> None:
    assert ask(shared_router, "GET", "/", host=host).status_code == 200
    assert ask(shared_router, "POST", "/v1/completions", host=host, origin=f"http://{host}").status_code == 200
    assert admin_client().put("/admin/speculation", json={"percentage": 5}, headers={"host": host}).status_code == 200


def test_one_foreign_name_of_two_is_enough(shared_router: Router) -> None:
    address, port = shared_router.url.removeprefix("http://").split(":")
    for hosts in ("Host: localhost\r\nHost: evil.example", "Host: evil.example\r\nHost: localhost"):
        with socket.create_connection((address, int(port)), timeout=WAIT_S) as connection:
            connection.sendall(f"GET /version HTTP/1.1\r\n{hosts}\r\n\r\n".encode())
            assert connection.recv(12) == b"HTTP/1.1 403"


@pytest.mark.parametrize(
    "origin", [EVIL, "http://localhost.evil.example", "null", "", "http://[", "chrome-extension://a"]
)
def test_a_page_of_another_site_changes_nothing(router: Router, target, origin: str) -> None:
    for path in ("/v1/completions", "/v1/messages", "/tokenize", "/ping"):
        refused = ask(router, "POST", path, origin=origin)
        assert refused.status_code == 403, path
    assert refused.json()["error"]["type"] == "invalid_request_error"
    assert ask(router, "DELETE", "/v1/responses/x", origin=origin).status_code == 403
    assert ask(router, "GET", "/v1/models", origin=origin).status_code == 200  # the browser hides the answer
    assert not target.requests
    admin = admin_client()
    headers = {"origin": origin}
    assert admin.put("/admin/speculation", json={"percentage": 5}, headers=headers).status_code == 403
    assert admin.get("/admin/speculation").json() == {"percentage": 100}


def test_anthropics_clients_get_their_own_error(shared_router: Router) -> None:
    refused = ask(shared_router, "POST", "/v1/messages", origin=EVIL)
    assert refused.json()["error"]["type"] == "permission_error"


@pytest.mark.parametrize("origin", ["http://localhost:3000", "https://127.0.0.1", "http://[::1]:5173"])
def test_a_page_of_this_machine_may_call(shared_router: Router, origin: str) -> None:
    assert ask(shared_router, "POST", "/v1/completions", origin=origin).status_code == 200


def test_configured_names_and_pages_may_call(new_router, target) -> None:
    router = new_router([target.address], allowed_hosts=["Chat.Example"], cors_allow_origins=["https://web.example"])
    assert ask(router, "POST", "/v1/completions", host="chat.example:80", origin="https://chat.example").is_success
    assert ask(router, "POST", "/v1/completions", origin="https://web.example").is_success
    assert ask(router, "GET", "/version", host="web.example").status_code == 403
    assert ask(router, "POST", "/v1/completions", origin=EVIL).status_code == 403
    every = new_router([target.address], cors_allow_origins=["*"])
    assert ask(every, "POST", "/v1/completions", origin=EVIL).is_success
    assert ask(every, "POST", "/v1/completions", host="evil.example").status_code == 403


def test_nothing_is_refused_where_keys_or_other_machines_are(new_router, target, tmp_path: Path) -> None:
    key = "sk-alice-0123456789abcdef"
    (tmp_path / "keys").write_text(f"alice:{key}\n")
    headers = {"host": "api.example", "origin": EVIL}
    keyed = new_router([target.address], api_keys_file=str(tmp_path / "keys"))
    assert ask(keyed, "POST", "/v1/completions", authorization=f"Bearer {key}", **headers).is_success
    assert ask(keyed, "POST", "/v1/completions", **headers).status_code == 401
    reached = new_router([target.address], host="0.0.0.0")
    assert ask(reached, "POST", "/v1/completions", **headers).is_success
    for name in ("api_keys_file", "admin_keys_file"):
        admin = admin_client(**{name: str(tmp_path / "keys")})
        bearer = {"authorization": f"Bearer {key}"}
        assert admin.put("/admin/speculation", json={"percentage": 5}, headers=headers | bearer).is_success
    for listen in ("0.0.0.0:8001", "10.0.0.9:8001"):
        assert admin_client(admin_listen=listen).get("/admin/speculation", headers=headers).is_success


@pytest.mark.parametrize(
    ("settings", "public", "admin"),
    [
        ({}, True, False),
        ({"admin_listen": "[::1]:8001"}, True, True),
        ({"admin_listen": "localhost:8001", "host": "0.0.0.0"}, False, True),
        ({"admin_listen": "0.0.0.0:8001", "host": "::1"}, True, False),
        ({"admin_listen": "127.0.0.1:8001", "admin_keys_file": "keys"}, True, False),
        ({"admin_listen": "127.0.0.1:8001", "api_keys_file": "keys"}, False, False),
    ],
)
def test_the_two_addresses_decide_apart(settings: dict[str, str], public: bool, admin: bool, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("alice:sk-alice-0123456789abcdef\n")
    paths = {name: str(tmp_path / "keys") for name in settings if name.endswith("_file")}
    credentials = Credentials.of(Config.model_validate({"router": settings | paths}).router, {})
    assert (credentials.public_sites is not None, credentials.admin_sites is not None) == (public, admin)


@pytest.mark.parametrize("name", ["*", "https://chat.example", "chat.example:80", "a b", ""])
def test_an_allowed_host_is_a_name(name: str) -> None:
    with pytest.raises(ValidationError, match="String should match pattern"):
        Config.model_validate({"router": {"allowed_hosts": [name]}})
