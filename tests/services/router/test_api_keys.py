"""Keys of clients: who is let in, told why not, limited, counted and written down."""

from __future__ import annotations

import hashlib
import http.client
import logging
import re
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import openai
import pytest
from starlette.testclient import TestClient

from cluster.config import Config
from cluster.errors import ConfigurationError
from services.http_call import LAUNCHER_KEY_SHA256
from services.router.access.api_keys import ApiKeys, KeyAttributes, parse_keys
from services.router.access.gate import Credentials
from services.router.access.key_limits import KeyLimits
from services.router.errors import RateLimitError
from services.router.main import warn_of_open_doors
from services.router.metrics import RouterMetrics
from services.router.operators.admin import create_admin_app
from services.router.operators.health import Health
from services.router.operators.switch import SpeculationSwitch
from services.router.targets.retry_after import RetryAfter
from tests.clock import Clock
from tests.services.router.conftest import Router
from tests.waiting import WAIT_S, wait_until

ALICE, BOB = "sk-alice-0123456789abcdef", "sk-bob-0123456789abcdef"
SCRAPER = "scrape-0123456789abcdef"
PAYLOAD = {"prompt": [70], "max_tokens": 3}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    digest = hashlib.sha256(BOB.encode()).hexdigest()
    path.write_text(f"# who may call\nalice:{ALICE}\n\nbob:sha256:{digest}\n")
    return path


@pytest.fixture
def new_keyed_router(new_router, target, keys_file) -> Callable[..., Router]:
    return lambda **settings: new_router([target.address], api_keys_file=str(keys_file), **settings)


@pytest.fixture
def keyed(new_keyed_router) -> Router:
    return new_keyed_router()


def audit_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "outrider.audit"]


def test_a_key_is_asked_for_everywhere_but_by_probes(keyed: Router) -> None:
    for method, path in (
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/tokenize"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/x"),
        ("GET", "/metrics"),
        ("GET", "/version"),
        ("GET", "/nowhere"),
        ("OPTIONS", "/v1/completions"),
        ("GET", "/health/live/"),
    ):
        refused = keyed.client.request(method, path)
        assert refused.status_code == 401, path
        assert refused.headers["www-authenticate"] == "Bearer"
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert "Authorization: Bearer" in error["message"]
        assert refused.headers["x-request-id"]
    for path in ("/health/live", "/health", "/ping"):
        assert keyed.client.get(path).status_code == 200, path
    for key in (ALICE, BOB):
        assert keyed.client.post("/v1/completions", json=PAYLOAD, headers=bearer(key)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer wrong"},
        {"authorization": f"Bearer {ALICE}x"},
        {"authorization": f"Basic {ALICE}"},
        {"authorization": ALICE},
        {"authorization": "Bearer"},
        {"authorization": f"Bearer sha256:{hashlib.sha256(BOB.encode()).hexdigest()}"},
        {"x-api-key": "wrong"},
        {"x-api-key": f"Bearer {ALICE}"},
        {"api-key": ALICE},
    ],
)
def test_a_wrong_key_is_refused_and_not_repeated(keyed: Router, target, headers, caplog) -> None:
    refused = keyed.client.post("/v1/completions", json=PAYLOAD, headers=headers)
    assert refused.status_code == 401
    (value,) = headers.values()
    secret = value.split()[-1]
    for text in (refused.text, *audit_lines(caplog)):
        assert secret == "Bearer" or secret not in text
    assert not target.requests


@pytest.mark.parametrize(
    "headers",
    [
        [("authorization", "Bearer wrong"), ("authorization", f"Bearer {ALICE}")],
        [("authorization", f"Bearer {ALICE}"), ("authorization", f"Bearer {ALICE}")],
        [("x-api-key", ALICE), ("x-api-key", ALICE)],
        [("x-api-key", ALICE), ("authorization", "Bearer wrong")],
        [("x-api-key", ALICE), ("authorization", f"Bearer {BOB}")],
        [("x-api-key", "wrong"), ("authorization", f"Bearer {ALICE}")],
        [("x-api-key", ALICE), ("authorization", f"Basic {ALICE}")],
    ],
)
def test_two_headers_are_one_too_many(keyed: Router, headers: list[tuple[str, str]]) -> None:
    assert keyed.client.get("/v1/models", headers=headers).status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"x-api-key": ALICE},
        {"X-Api-Key": ALICE, "authorization": f"Bearer {ALICE}"},
        {"X-Api-Key": "", "authorization": f"Bearer {ALICE}"},  # as clients send it whose key is set to nothing
        {"X-Api-Key": ALICE, "authorization": "Bearer"},
    ],
)
def test_a_key_comes_in_either_header(keyed: Router, headers: dict[str, str]) -> None:
    assert keyed.client.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("headers", [{"authorization": "Basic x"}, {"authorization": "Bearer x", "x-api-key": "y"}])
def test_without_keys_no_header_is_read(router: Router, headers: dict[str, str]) -> None:
    assert router.client.get("/v1/models", headers=headers).status_code == 200


def test_the_scheme_may_be_written_in_any_case(keyed: Router) -> None:
    assert keyed.client.get("/v1/models", headers={"authorization": f"bearer {ALICE}"}).status_code == 200


def test_health_shows_workers_to_those_with_a_key(keyed: Router, target) -> None:
    assert keyed.client.get("/health").json() == {"status": "ok"}
    assert keyed.client.get("/health", headers=bearer("wrong")).json() == {"status": "ok"}
    (shown,) = keyed.client.get("/health", headers=bearer(ALICE)).json()["targets"]
    assert (shown["status"], shown["problem"], shown["running"]) == ("up", None, 1)


ADDRESS = re.compile(r"(?<!http://)127\.0\.0\.1:\d+|nowhere\.invalid|gateway")


def everything_public(router: Router, **headers: str) -> str:
    """Returns all that a client can read, over several endpoints and requests."""
    client, answers = router.client, []
    for path in ("/health", "/metrics", "/v1/models", "/version", "/ping", "/openapi.json", "/nothing"):
        answers.append(client.get(path, headers=headers))
    for body in (PAYLOAD, PAYLOAD | {"stream": True}, PAYLOAD | {"temperature": 9}, PAYLOAD | {"model": "none"}):
        answers.append(client.post("/v1/completions", json=body, headers=headers))
    return "\n".join(f"{answer.headers} {answer.text}" for answer in answers)


def test_a_key_may_have_a_prefix_cache_of_its_own(new_keyed_router, target) -> None:
    def salts(router: Router) -> list[str]:
        for key in (ALICE, BOB):
            for salt in ({}, {"cache_salt": "bob x"}):
                body = {"prompt": "a", "max_tokens": 1, **salt}
                router.client.post("/v1/completions", json=body, headers=bearer(key)).raise_for_status()
        return [request.cache_salt for request in target.requests[-4:]]

    assert salts(new_keyed_router()) == ["", "bob x"] * 2
    assert salts(new_keyed_router(cache_salt="key")) == ["alice ", "alice bob x", "bob ", "bob bob x"]


@pytest.mark.parametrize("failure", [None, "UNAVAILABLE", "INTERNAL", "RESOURCE_EXHAUSTED", "NOT_FOUND"])
def test_clients_are_not_told_where_workers_are(new_router, target, keys_file, failure: str | None) -> None:
    target.description.advertised_address = "gateway:7000"
    if failure is not None:
        target.fail_after, target.failure = 0, (grpc.StatusCode[failure], f"lost {target.address}")
    addresses = [target.address, "127.0.0.1:9"]
    settings = {"max_pause_seconds": 0.2}
    keyed = new_router(addresses, api_keys_file=str(keys_file), **settings)
    assert not ADDRESS.search(everything_public(keyed, **bearer(ALICE)))
    assert not ADDRESS.search(everything_public(new_router(addresses, host="0.0.0.0", **settings)))
    nobody = new_router(["127.0.0.1:9", "nowhere.invalid:9"], host="0.0.0.0", **settings)
    assert not ADDRESS.search(everything_public(nobody))
    assert nobody.client.get("/health").json()["reason"] == "2 down"


def test_operators_are_told_where_workers_are(new_router, target, keys_file, tmp_path: Path) -> None:
    admins = tmp_path / "admins"
    admins.write_text(f"root:{ALICE}\nother:adminadminadminadmin\n")
    router = new_router([target.address], api_keys_file=str(keys_file), admin_keys_file=str(admins))
    (shown,) = router.client.get("/health", headers=bearer(ALICE)).json()["targets"]
    assert shown["address"] == target.address  # her key is an operator's as well
    (hidden,) = router.client.get("/health", headers=bearer(BOB)).json()["targets"]
    assert "address" not in hidden
    config = Config.model_validate({"router": {"admin_keys_file": str(admins)}})
    replica = SimpleNamespace(address=target.address, status="down", problem="is lost", description=None)
    metrics, pool = RouterMetrics("m"), SimpleNamespace(replicas=[replica], usable=[], retry_after=5)
    credentials = Credentials.of(config.router, {})
    app = create_admin_app(SpeculationSwitch(100, metrics), metrics, credentials, health=Health(pool, "m"))
    client = TestClient(app)
    assert client.get("/health").status_code == 401
    answer = client.get("/health", headers=bearer(ALICE))
    assert answer.json()["reason"] == f"target {target.address}: is lost"


def test_without_a_file_nobody_is_asked(router: Router) -> None:
    assert router.complete(**PAYLOAD).status_code == 200
    assert router.client.get("/health").json()["targets"]


def test_the_official_client(keyed: Router) -> None:
    def client(key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=keyed.url + "/v1", api_key=key, max_retries=0)

    assert client(ALICE).completions.create(model=keyed.model, prompt="the", max_tokens=2).choices
    with pytest.raises(openai.AuthenticationError) as refused:
        client("wrong").completions.create(model=keyed.model, prompt="the", max_tokens=2)
    assert refused.value.code == "invalid_api_key"


def test_nothing_of_the_body_is_read_before_the_key(keyed: Router) -> None:
    """The answer comes although what was announced is never sent."""
    host, port = keyed.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        head = b"POST /v1/completions HTTP/1.1", b"host: x", b"content-type: application/json", b"content-length: 99999"
        connection.sendall(b"\r\n".join(head) + b"\r\n\r\n{")
        assert connection.recv(4096).startswith(b"HTTP/1.1 401 ")


def test_a_key_over_its_rate(new_keyed_router) -> None:
    router = new_keyed_router(requests_per_minute_per_key=3)
    codes = [router.client.get("/v1/models", headers=bearer(ALICE)).status_code for _ in range(5)]
    assert codes == [200] * 3 + [429] * 2
    refused = router.client.post("/v1/completions", json=PAYLOAD, headers=bearer(ALICE))
    assert refused.json()["error"] == {
        "message": "the key 'alice' has made 3 requests within a minute, which is its limit; slow down",
        "type": "rate_limit_error",
        "param": None,
        "code": "rate_limit_exceeded",
    }
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert router.client.get("/v1/models", headers=bearer(BOB)).status_code == 200  # others have their own
    with pytest.raises(openai.RateLimitError):
        openai.OpenAI(base_url=router.url + "/v1", api_key=ALICE, max_retries=0).models.list()


def test_a_key_over_its_concurrency(new_keyed_router, target) -> None:
    router = new_keyed_router(max_requests_per_key=1)
    target.hang_after = 1
    body = PAYLOAD | {"stream": True}
    with router.client.stream("POST", "/v1/completions", json=body, headers=bearer(ALICE)) as running:
        pieces = running.iter_text()
        next(pieces)
        refused = router.client.post("/v1/completions", json=PAYLOAD, headers=bearer(ALICE))
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert router.client.get("/v1/models", headers=bearer(BOB)).status_code == 200
    target.hang_after = None

    def is_free() -> bool:
        return router.client.post("/v1/completions", json=PAYLOAD, headers=bearer(ALICE)).status_code == 200

    wait_until(is_free)


def test_the_window_of_the_rate_moves_on() -> None:
    clock = Clock()
    limits = KeyLimits(2, None, clock)

    def try_one() -> int | None:
        try:
            with limits.entered("a"):
                return None
        except RateLimitError as error:
            return error.retry_after

    assert [try_one() for _ in range(2)] == [None, None]
    clock.now += 20.5
    assert try_one() == 40
    clock.now += 39.5
    assert [try_one(), try_one()] == [None, None]
    assert try_one() == 60
    with limits.entered("b"):
        pass


def test_the_file_is_read_anew_and_a_broken_one_is_not(keyed: Router, keys_file: Path, caplog) -> None:
    def code(key: str) -> int:
        return keyed.client.get("/v1/models", headers=bearer(key)).status_code

    new = keys_file.with_name("new")
    new.write_text("carol:sk-carol-0123456789abcdef\n")
    new.replace(keys_file)
    wait_until(lambda: code("sk-carol-0123456789abcdef") == 200)
    assert code(ALICE) == 401
    caplog.clear()
    keys_file.write_text("dave sk-dave-0123456789abcdef\n")
    wait_until(lambda: any(record.levelno == logging.WARNING for record in caplog.records if "keys" in record.name))
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "services.router.access.api_keys"]
    assert "line 1" in warning
    assert "the previous keys stay in use" in warning
    assert "sk-dave" not in warning
    assert code("sk-carol-0123456789abcdef") == 200
    keys_file.unlink()
    wait_until(lambda: "No such file" in caplog.text)
    assert code("sk-carol-0123456789abcdef") == 200
    keys_file.write_text(f"alice:{ALICE}\n")
    wait_until(lambda: code(ALICE) == 200)


def test_a_secret_of_kubernetes_is_followed_through_its_links(tmp_path: Path) -> None:
    for version, key in (("v1", ALICE), ("v2", BOB)):
        (tmp_path / version).mkdir()
        (tmp_path / version / "keys").write_text(f"someone:{key}\n")
    data = tmp_path / "..data"
    data.symlink_to("v1")
    (tmp_path / "keys").symlink_to("..data/keys")
    keys = ApiKeys(str(tmp_path / "keys"), "router.api_keys_file")
    assert keys.name_of(ALICE.encode()) == "someone"
    (tmp_path / "..tmp").symlink_to("v2")
    (tmp_path / "..tmp").rename(data)
    keys.look()
    keys.look()
    assert (keys.name_of(ALICE.encode()), keys.name_of(BOB.encode())) == (None, "someone")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no key"),
        ("# nothing\n", "no key"),
        ("alice\n", "line 1"),
        ("alice:\n", "line 1"),
        (":sk-secret\n", "line 1"),
        ("a b:sk-secret\n", "line 1"),
        ("ok:sk-0123456789abcdef\nalice:sk secret\n", "line 2"),
        ("alice:sha256:sk-secret\n", "64 hexadecimal"),
        ("alice:sk-secret-0123456789\nbob:sk-secret-0123456789\n", "bob has the same key as alice"),
        ("alice:sk-0123456789abcdef priority=secret\n", "line 1: after the key"),
        ("alice:sk-0123456789abcdef secret=1\n", "priority=own or all"),
        ("alice:sk-0123456789abcdef output_token_ms=secret\n", "output_token_ms=MILLISECONDS"),
        ("alice:sk-0123456789abcdef output_token_ms=0.0\n", "output_token_ms=MILLISECONDS"),
        ("alice:sk-0123456789abcdef priority=all priority=own\n", "given twice"),
        ("alice:sk-secret-0123456789\nalice:sk-secret-012345678 priority=all\n", "other attributes"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_without_a_key(text: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=complaint) as error:
        parse_keys(text)
    assert "secret" not in str(error.value)
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=r"router\.api_keys_file"):
        ApiKeys(str(path), "router.api_keys_file")


def test_a_missing_file_keeps_the_router_from_starting(new_router, target) -> None:
    with pytest.raises(ConfigurationError, match=r"router\.api_keys_file: cannot read .*No such file"):
        new_router([target.address], api_keys_file="/nowhere/keys")


def test_a_name_may_have_an_old_and_a_new_key() -> None:
    names, _ = parse_keys(f"alice:{ALICE}\nalice:{BOB}\n")
    assert set(names.values()) == {"alice"}


def test_attributes_follow_a_key() -> None:
    _, attributes = parse_keys(f"alice:{ALICE}\nbob:{BOB}   priority=all output_token_ms=25.5\n")
    assert attributes == {"alice": KeyAttributes(), "bob": KeyAttributes(priority="all", output_token_ms=25.5)}


def test_a_limit_is_that_of_the_request_or_else_of_its_key(new_router, target, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"alice:{ALICE} output_token_ms=40\nbob:{BOB}\n")
    router = new_router([target.address], api_keys_file=str(tmp_path / "keys"))
    wait_until(lambda: router.client.get("/health").status_code == 200)
    limits = []
    for key, fields in ((ALICE, {}), (ALICE, {"outrider": {"output_token_ms": 25}}), (BOB, {})):
        headers = {"authorization": f"Bearer {key}"}
        body = {"prompt": "fox", "max_tokens": 1} | fields
        assert router.client.post("/v1/completions", json=body, headers=headers).status_code == 200
        request = target.requests[-1]
        limits.append(request.output_token_ms if request.HasField("output_token_ms") else None)
    assert limits == [40, 25, None]


def test_targets_learn_whose_turn_it_is_but_not_who(new_router, target, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"alice:{ALICE}\nbob:{BOB} priority=all\ncarol:sk-carol-0123456789\n")
    router = new_router([target.address], api_keys_file=str(tmp_path / "keys"))
    wait_until(lambda: router.client.get("/health").status_code == 200)
    owners = {}
    for key in (ALICE, BOB, "sk-carol-0123456789"):
        headers = {"authorization": f"Bearer {key}"}
        body = {"prompt": "fox", "max_tokens": 1, "priority": -5, "n": 2}
        assert router.client.post("/v1/completions", json=body, headers=headers).status_code == 200
        assert {request.priority for request in target.requests[-2:]} == {-5}
        (owners[key],) = {request.owner for request in target.requests[-2:]}
    assert owners[BOB] == b""
    assert len(set(owners.values())) == 3
    assert b"alice" not in owners[ALICE]


def test_usage_is_counted_by_the_name_of_the_key(new_keyed_router, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(SCRAPER)
    keyed = new_keyed_router(metrics_token_file=str(tmp_path / "token"))
    for key, num_tokens in ((ALICE, 3), (BOB, 2)):
        body = {"prompt": [70, 71], "max_tokens": num_tokens, "n": 2}
        assert keyed.client.post("/v1/completions", json=body, headers=bearer(key)).status_code == 200
    keyed.client.get("/v1/models", headers=bearer("wrong"))
    page = keyed.client.get("/metrics", headers=bearer(SCRAPER)).text
    for line in (
        'outrider_requests_by_key_total{code="200",key="alice"} 1.0',
        'outrider_requests_by_key_total{code="200",key="bob"} 1.0',
        'outrider_requests_by_key_total{code="401",key=""} 1.0',
        'outrider_prompt_tokens_by_key_total{key="alice"} 2.0',
        'outrider_generation_tokens_by_key_total{key="alice"} 6.0',
        'outrider_generation_tokens_by_key_total{key="bob"} 4.0',
    ):
        assert line in page
    assert ALICE not in page


def test_a_client_sees_the_use_of_its_own_key_alone(new_keyed_router, tmp_path: Path) -> None:
    (tmp_path / "operators").write_text(f"ops:{ALICE}\n")
    for settings, sees_all in (({}, False), ({"admin_keys_file": str(tmp_path / "operators")}, True)):
        router = new_keyed_router(**settings)
        for key in (ALICE, BOB, "wrong"):
            router.client.post("/v1/completions", json=PAYLOAD, headers=bearer(key))
        for key, own, other in ((ALICE, "alice", "bob"), (BOB, "bob", "alice")):
            page = router.client.get("/metrics", headers=bearer(key)).text
            names = set(re.findall(r'key="([^"]*)"', page))
            assert names == ({"", own, other} if sees_all and key == ALICE else {own})
            assert f'outrider_generation_tokens_by_key_total{{key="{own}"}} 3.0' in page
            assert 'vllm:generation_tokens_total{engine="router",' in page


def test_a_scrape_has_a_token_of_its_own(new_keyed_router, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(f"{SCRAPER}\nscrape-old-0123456789\n")
    router = new_keyed_router(metrics_token_file=str(token))
    for known in (SCRAPER, "scrape-old-0123456789", ALICE):
        assert router.client.get("/metrics", headers=bearer(known)).status_code == 200
    assert router.client.get("/v1/models", headers=bearer(SCRAPER)).status_code == 401
    assert router.client.get("/metrics").status_code == 401
    token.write_text("scrape-new-0123456789\n")
    assert router.client.get("/metrics", headers=bearer(SCRAPER)).status_code == 401
    assert router.client.get("/metrics", headers=bearer("scrape-new-0123456789")).status_code == 200


def test_a_token_for_metrics_without_keys_for_the_rest(new_router, target, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(SCRAPER)
    router = new_router([target.address], metrics_token_file=str(token))
    assert router.client.get("/metrics").status_code == 401
    assert router.client.get("/metrics", headers=bearer(SCRAPER)).status_code == 200
    assert router.complete(**PAYLOAD).status_code == 200


def test_the_launcher_may_look_and_nothing_else(new_keyed_router, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCHER_KEY_SHA256, hashlib.sha256(b"launcher").hexdigest())
    router = new_keyed_router()
    assert router.client.get("/health", headers=bearer("launcher")).json()["targets"]
    assert router.client.get("/metrics", headers=bearer("launcher")).status_code == 200
    assert router.client.post("/v1/completions", json=PAYLOAD, headers=bearer("launcher")).status_code == 401


def test_pages_of_other_origins(new_keyed_router) -> None:
    router = new_keyed_router(cors_allow_origins=["https://chat.example"])
    asking = {
        "origin": "https://chat.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    preflight = router.client.options("/v1/chat/completions", headers=asking)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://chat.example"
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    for key, code in (("wrong", 401), (ALICE, 200)):
        answer = router.client.get("/v1/models", headers=bearer(key) | {"origin": "https://chat.example"})
        assert answer.status_code == code
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"
        assert "retry-after" in answer.headers["access-control-expose-headers"]
    other = router.client.get("/v1/models", headers=bearer(ALICE) | {"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers


def test_a_bug_has_the_headers_of_cors_too(new_router, target, monkeypatch: pytest.MonkeyPatch) -> None:
    router = new_router([target.address], cors_allow_origins=["*"])
    monkeypatch.setattr("services.router.api.completions.Completions._encode", lambda *_: 1 / 0)
    answer = router.client.post("/v1/completions", json=PAYLOAD, headers={"origin": "https://chat.example"})
    assert answer.status_code == 500
    assert answer.headers["access-control-allow-origin"] == "*"


def test_a_denied_request_is_one_line(keyed: Router, caplog) -> None:
    keyed.client.get("/v1/models", headers=bearer("wrong"))
    (line,) = audit_lines(caplog)
    assert line.startswith("audit: refused 401: GET '/v1/models' from '127.0.0.1', key 'none': the API key does not")


@pytest.mark.parametrize(
    "head",
    [
        b"GET /v1/%0d%0aaudit:%20refused%20nothing HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer a\r\n b: c\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: 1.1.1.1\x85audit: refused\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Request-Id: a\rb\r\nAuthorization: Bearer a\rb\r\n\r\n",
    ],
)
def test_headers_and_paths_forge_no_line(keyed: Router, head: bytes, caplog) -> None:
    host, port = keyed.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        connection.sendall(head)
        status = connection.recv(4096).split()[1]
    assert status in (b"400", b"401")  # 400: the server does not take such a header
    for record in caplog.records:
        if record.levelno >= logging.INFO and record.name != "uvicorn.access":  # which a router does not log
            assert len(record.getMessage().splitlines()) == 1


def test_operators_have_keys_of_their_own(tmp_path: Path, keys_file: Path, caplog) -> None:
    admin_keys = tmp_path / "admin-keys"
    admin_keys.write_text("ops:sk-ops-0123456789abcdef\n")

    def client(**files: Any) -> TestClient:
        config = Config.model_validate({"router": {name: str(path) for name, path in files.items()}})
        metrics = RouterMetrics("m")
        return TestClient(create_admin_app(SpeculationSwitch(100, metrics), metrics, Credentials.of(config.router, {})))

    alone = client(api_keys_file=keys_file)
    assert alone.get("/admin/speculation").status_code == 401
    assert alone.get("/metrics").status_code == 401
    assert alone.get("/admin/speculation", headers=bearer(ALICE)).status_code == 200
    separate = client(api_keys_file=keys_file, admin_keys_file=admin_keys)
    assert separate.get("/admin/speculation", headers=bearer(ALICE)).status_code == 401
    caplog.clear()
    with caplog.at_level(logging.INFO):
        body = {"percentage": 25, "reason": "try"}
        headers = bearer("sk-ops-0123456789abcdef")
        assert separate.put("/admin/speculation", json=body, headers=headers).status_code == 200
        assert separate.get("/metrics", headers=headers).text.startswith("# HELP")
    switched, *calls = audit_lines(caplog)
    assert "set by ops at 'testclient'" in switched
    assert calls == [
        f"audit: answered 200: {call} from 'testclient', key 'ops'"
        for call in ("PUT '/admin/speculation'", "GET '/metrics'")
    ]


def test_metrics_at_the_admin_address_take_the_scrapers_token(tmp_path: Path, keys_file: Path) -> None:
    token = tmp_path / "token"
    token.write_text(SCRAPER)
    config = Config.model_validate({"router": {"api_keys_file": str(keys_file), "metrics_token_file": str(token)}})
    metrics = RouterMetrics("m")
    client = TestClient(create_admin_app(SpeculationSwitch(100, metrics), metrics, Credentials.of(config.router, {})))
    assert client.get("/metrics", headers=bearer(SCRAPER)).status_code == 200
    assert client.get("/admin/speculation", headers=bearer(SCRAPER)).status_code == 401


def test_who_finds_nobody_is_told_to_come_back_when_somebody_may_be_there(new_router, target) -> None:
    router = new_router(["127.0.0.1:9"])
    for answer in (router.complete(**PAYLOAD), router.client.get("/health")):
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 5
    absences = RetryAfter(now=0.0)
    assert absences.retry_after == 5
    absences.note(has_target=True, now=12.5)
    assert absences.retry_after == 13
    absences.note(has_target=False, now=100.0)
    absences.note(has_target=False, now=150.0)
    absences.note(has_target=True, now=1000.0)
    assert absences.retry_after == 60


@pytest.mark.parametrize(
    ("settings", "warned_of"),
    [
        ({"host": "127.0.0.1", "admin_listen": "127.0.0.1:8001"}, []),
        ({"host": "localhost", "admin_listen": "[::1]:8001"}, []),
        ({"host": "0.0.0.0"}, ["router.api_keys_file"]),
        ({"host": "::", "admin_listen": "0.0.0.0:8001"}, ["router.api_keys_file", "router.admin_keys_file"]),
        ({"host": "0.0.0.0", "admin_listen": "0.0.0.0:8001", "api_keys_file": "k", "admin_keys_file": "a"}, []),
        ({"admin_listen": "127.0.0.1:8001", "api_keys_file": "keys"}, ["router.admin_keys_file is not set"]),
        ({"api_keys_file": "keys"}, []),
    ],
)
def test_a_door_that_is_open_to_all_is_warned_of(settings: dict[str, str], warned_of: list[str], caplog) -> None:
    warn_of_open_doors(Config.model_validate({"router": settings}))
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == len(warned_of)
    for warning, setting in zip(warnings, warned_of, strict=True):
        assert setting in warning


def test_a_head_request_tells_no_more(keyed: Router) -> None:
    connection = http.client.HTTPConnection(keyed.url.removeprefix("http://"), timeout=WAIT_S)
    connection.request("HEAD", "/v1/models")
    assert connection.getresponse().status == 401
