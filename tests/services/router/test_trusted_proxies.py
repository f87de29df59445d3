"""`X-Forwarded-For` names the client only if the router's operator trusts the proxy; logs quote what it sends."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError
from starlette.testclient import TestClient

from cluster.config import Config
from services.router.metrics import RouterMetrics
from services.router.operators.admin import create_admin_app
from services.router.operators.switch import SpeculationSwitch
from tests.waiting import wait_until

from .conftest import Router
from .test_api_keys import audit_lines

FORGED = "10.0.0.9' key 'ops': answered"


@pytest.fixture
def new_keyed_router(new_router, target, tmp_path: Path) -> Callable[..., Router]:
    (tmp_path / "keys").write_text("alice:sk-alice-0123456789abcdef\n")
    return lambda **settings: new_router([target.address], api_keys_file=str(tmp_path / "keys"), **settings)


@pytest.fixture
def clients_of(caplog: pytest.LogCaptureFixture) -> Callable[[Router, str], tuple[str, str]]:
    """Function that sends a request with `X-Forwarded-For`, and returns the client in the access log and the audit."""
    caplog.set_level(logging.INFO)

    def send(router: Router, forwarded_for: str) -> tuple[str, str]:
        caplog.clear()
        router.client.get("/v1/models", headers={"X-Forwarded-For": forwarded_for, "X-Forwarded-Proto": "https"})

        def logged() -> list[str]:
            return [record.fields["client"] for record in caplog.records if record.name == "outrider.access"]  # type: ignore[attr-defined]

        wait_until(lambda: bool(logged()))  # it is written after the answer
        (audited,) = audit_lines(caplog)
        return logged()[0], audited.removeprefix("audit: refused 401: GET '/v1/models' from ").split(": the ")[0]

    return send


def test_nobody_is_believed_by_default(new_keyed_router, clients_of, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")  # uvicorn's own variable
    assert clients_of(new_keyed_router(), "10.0.0.9") == ("127.0.0.1", "'127.0.0.1', key 'none'")


@pytest.mark.parametrize("trusted", ["127.0.0.1", "127.0.0.0/8"])
def test_a_trusted_proxy_names_the_client(new_keyed_router, clients_of, trusted: str) -> None:
    router = new_keyed_router(trusted_proxies=[trusted])
    assert clients_of(router, "10.0.0.9") == ("10.0.0.9", "'10.0.0.9', key 'none'")
    # The last address that is no trusted proxy counts, as the client may have sent the ones before it.
    assert clients_of(router, "1.1.1.1, 10.0.0.9, 127.0.0.1")[0] == "10.0.0.9"
    assert clients_of(router, FORGED) == (FORGED, f"\"{FORGED}\", key 'none'")


def test_another_proxy_is_not_believed(new_keyed_router, clients_of) -> None:
    assert clients_of(new_keyed_router(trusted_proxies=["10.0.0.0/8"]), "10.0.0.9")[0] == "127.0.0.1"


def test_an_operators_host_is_quoted(caplog: pytest.LogCaptureFixture) -> None:
    metrics = RouterMetrics("m")
    client = TestClient(
        create_admin_app(SpeculationSwitch(100, metrics), metrics), client=("x, reason: 'none'\naudit: y", 1)
    )
    assert client.put("/admin/speculation", json={"percentage": 5, "reason": "try"}).status_code == 200
    switched, *_ = audit_lines(caplog)
    assert switched == (
        "audit: speculation for 5 % of requests, was 100 %; set by \"x, reason: 'none'\\naudit: y\", reason: 'try'"
    )


@pytest.mark.parametrize("written", ["*", "10.0.0.1/8", "proxy.internal", "10.0.0.9:80"])
def test_a_proxy_is_an_address_or_a_network(written: str) -> None:
    with pytest.raises(ValidationError, match="not a valid IPv4 or IPv6 network"):
        Config.model_validate({"router": {"trusted_proxies": [written]}})
