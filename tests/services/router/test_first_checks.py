"""No spelling of a path reaches a handler without that handler's checks, at both of the router's addresses."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.config import Config
from services.router.access.caller import caller_of
from services.router.app import create_app
from services.router.operators.admin import create_admin_app
from tests.waiting import WAIT_S

from .conftest import Router

KEY = "sk-alice-0123456789abcdef"
SCRAPER = "scrape-0123456789abcdef"
NO_KEY_NEEDED = {"/", "/health", "/health/live", "/ping"}
ADMITTED = {
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses/input_tokens",
    "/tokenize",
    "/detokenize",
    "/v1/tokenize",
    "/v1/detokenize",
}
BETWEEN = ("%2F", "//", "/./", "/;/", "%0A/", "/%0A", "%0D/")
ATTACHED = ("%0A", "%0D", "%0D%0A", "%00", "%7F", "%C2%85", "%E2%80%A8", "%2F", "/", "//", "/.", ".", "..", ";", ";a=b")


def spellings(route: str) -> Iterator[str]:
    """The route's path and variants of it, as a client sends them."""
    path = route.replace("{model:path}", "x").replace("{response_id}", "x").replace("{name:path}", "x")
    yield path
    yield from (path + more for more in ATTACHED)
    yield from ("/" + path, "/%2F" + path[1:], "/." + path, "/%0A" + path[1:])
    places = [index for index, character in enumerate(path) if character == "/" and index]
    yield from (path[:place] + how + path[place + 1 :] for place, how in itertools.product(places, BETWEEN))


class Reached(list[tuple[str, Scope, int]]):
    """Handlers that requests reached: route, scope, and the number of admitted requests at that time."""


def reached_by(app: Starlette, metrics: Any, headers: dict[str, str]) -> tuple[Reached, set[int]]:
    """Sends every spelling of every route to `app`, whose handlers are replaced by ones that note the request."""
    reached, statuses = Reached(), set()

    def noting(path: str) -> Callable[[Scope, Receive, Send], Any]:
        async def note(scope: Scope, receive: Receive, send: Send) -> None:
            running = metrics.registry.get_sample_value(
                "vllm:num_requests_running", {"model_name": "tiny-model", "engine": "router"}
            )
            reached.append((path, scope, int(running)))
            await Response()(scope, receive, send)

        return note

    routes: Any = app.routes
    paths = [(route.path, sorted(route.methods)) for route in routes]
    for route in routes:
        route.app = noting(route.path)

    async def send_all() -> None:
        # As uvicorn does, the transport decodes the path.
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
            for path, methods in paths:
                for spelling, method in itertools.product(spellings(path), methods):
                    url = httpx.URL("http://127.0.0.1").copy_with(raw_path=spelling.encode())
                    answer = await client.request(method, url, headers=headers)
                    statuses.add(answer.status_code)
                    if any(code in spelling for code in ("%0", "%7F", "%C2%85", "%E2%80%A8")):
                        assert answer.status_code == 400, spelling
                        if method != "HEAD" and not path.startswith("/v1/messages"):  # Anthropic's envelope
                            assert answer.json()["error"]["type"] == "invalid_request_error"

    asyncio.run(send_all())
    return reached, statuses


@pytest.fixture
def new_apps(model_folder: Path, tmp_path: Path) -> Callable[..., tuple[Starlette, Starlette]]:
    """Makes the applications of both addresses."""
    (tmp_path / "keys").write_text(f"alice:{KEY}\n")
    (tmp_path / "token").write_text(SCRAPER)

    def make(*files: str) -> tuple[Starlette, Starlette]:
        settings = {"api_keys_file": str(tmp_path / "keys"), "metrics_token_file": str(tmp_path / "token")}
        target = {"model": str(model_folder), "addresses": ["127.0.0.1:9"]}
        chosen = {name: settings[name] for name in files}
        app = create_app(Config.model_validate({"target": target, "router": {"page": True, **chosen}}))
        state = app.state
        return app, create_admin_app(
            state.switch, state.metrics, state.credentials, state.adapters, state.health, state.routing
        )

    return make


def test_without_a_key_only_open_routes_are_reached(new_apps) -> None:
    app, admin = new_apps("api_keys_file", "metrics_token_file")
    pages = {route.path for route in app.routes if route.path.startswith("/page/")} - {"/page/events"}
    reached, statuses = reached_by(app, app.state.metrics, {})
    assert {path for path, _, _ in reached} == NO_KEY_NEEDED | pages
    assert 401 in statuses
    reached, statuses = reached_by(admin, app.state.metrics, {})
    assert not reached
    assert statuses == {400, 401}


def test_metrics_need_their_token_where_nothing_else_needs_a_key(new_apps) -> None:
    app, admin = new_apps("metrics_token_file")
    for application in (app, admin):
        reached, _ = reached_by(application, app.state.metrics, {})
        assert "/metrics" not in {path for path, _, _ in reached}
        assert "/health" in {path for path, _, _ in reached}


def test_a_scraper_reaches_the_metrics_alone(new_apps) -> None:
    app, admin = new_apps("api_keys_file", "metrics_token_file")
    for application in (app, admin):
        reached, _ = reached_by(application, app.state.metrics, {"authorization": f"Bearer {SCRAPER}"})
        scraped = {path for path, scope, _ in reached if caller_of(scope) is not None}
        assert scraped == {"/metrics"}


def test_every_request_that_generates_is_admitted_first(new_apps) -> None:
    app, _ = new_apps("api_keys_file")
    reached, _ = reached_by(app, app.state.metrics, {"authorization": f"Bearer {KEY}"})
    num_running = {path: {running for other, _, running in reached if other == path} for path, _, _ in reached}
    assert {path for path, counts in num_running.items() if counts == {1}} == ADMITTED
    assert all(counts == {0} for path, counts in num_running.items() if path not in ADMITTED)
    assert num_running.keys() == {route.path for route in app.routes}


@pytest.mark.parametrize("path", ["/metrics%0A", "/v1/completions%0A", "/health%0a", "/v1/models/a%0Db"])
def test_a_path_with_a_control_character_is_400(router: Router, path: str) -> None:
    host, port = router.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        # The body never comes: its deadline does not matter.
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 9\r\n\r\n".encode())
        answer = connection.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"control character" in answer
