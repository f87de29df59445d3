"""Streams on which no token comes for some time, and connections on which no request does."""

from __future__ import annotations

import grpc
import httpx
import pytest

from services.router.http import streaming
from services.router.targets import failover

from .conftest import Router, ScriptedTarget

PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"]


@pytest.fixture
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "FIRST_COMMENT_S", 0.2)
    monkeypatch.setattr(streaming, "COMMENT_S", 0.1)


def lines_of(router: Router, path: str) -> list[str]:
    prompt = {"/v1/completions": {"prompt": [70, 71]}, "/v1/responses": {"input": "fox"}}
    body = prompt.get(path, {"messages": [{"role": "user", "content": "fox"}]})
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    with router.client.stream("POST", path, json={**body, limit: 2, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return [line for line in response.iter_lines() if line]


@pytest.mark.usefixtures("short_silence")
@pytest.mark.parametrize("path", PATHS)
def test_comments_come_until_the_first_token_and_between_tokens(
    router: Router, target: ScriptedTarget, path: str
) -> None:
    target.delay_s = 0.5
    lines = lines_of(router, path)
    assert lines[0] == ": keep-alive"
    events = [index for index, line in enumerate(lines) if not line.startswith(":")]
    assert any(line == ": keep-alive" for line in lines[events[0] : events[-1]])
    target.delay_s = 0.0
    assert len(lines_of(router, path)) == len(events)


@pytest.mark.usefixtures("short_silence")
@pytest.mark.parametrize("path", PATHS)
def test_an_error_after_a_comment_is_the_last_event(router: Router, target: ScriptedTarget, path: str) -> None:
    target.delay_s, target.fail_after = 0.4, 1
    target.failure = (grpc.StatusCode.INVALID_ARGUMENT, "the prompt is unusable")
    lines = lines_of(router, path)
    assert lines[0] == ": keep-alive"
    assert "the prompt is unusable" in lines[-1]


@pytest.mark.usefixtures("short_silence")
def test_a_response_that_fails_after_a_comment_begins_first(
    router: Router, target: ScriptedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenAI's client refuses a stream that does not begin with `response.created`."""
    monkeypatch.setattr(failover, "_MAX_MOVES", 2)
    target.hang_after, target.delay_s = 0, 0.4
    target.fail_after, target.failure = 0, (grpc.StatusCode.UNAVAILABLE, "going down")
    lines = [line for line in lines_of(router, "/v1/responses") if line.startswith("event: ")]
    assert lines == ["event: response.created", "event: response.in_progress", "event: response.failed"]


def test_an_early_error_has_its_status(router: Router, target: ScriptedTarget) -> None:
    target.fail_after, target.failure = 0, (grpc.StatusCode.INVALID_ARGUMENT, "the prompt is unusable")
    response = router.complete(prompt=[70], max_tokens=2, stream=True)
    assert response.status_code == 400


def test_paths_that_are_nearly_right(router: Router) -> None:
    assert router.client.get("/v1/models/").json() == router.client.get("/v1/models").json()
    twice = router.client.get("/v1/v1/models")
    assert twice.status_code == 404
    assert "base URL ends with /v1" in twice.json()["error"]["message"]
    slash = router.client.request("GET", httpx.URL(f"{router.url}//v1/models"))
    assert slash.status_code == 404
    assert "ends with a slash" in slash.json()["error"]["message"]
