"""Answers of a router as events, and the errors for unusable ones."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from cluster.errors import ConfigurationError
from services.event_stream import stream_events
from services.http_call import API_KEY
from tests.http_server import AnsweringServer, HttpAnswer, answering


@pytest.fixture
def server() -> Iterator[AnsweringServer]:
    with answering(lambda request: HttpAnswer()) as server:
        yield server


def test_events_are_read_with_the_key(server: AnsweringServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY, "secret")
    server.answer = lambda request: HttpAnswer(': comment\n\ndata: {"a": 1}\n\ndata: {"a": 2}\n\ndata: [DONE]\n\n')
    assert list(stream_events(server.url, "/v1/completions", {"prompt": "a"})) == [{"a": 1}, {"a": 2}]
    (request,) = server.requests
    assert (request.path, json.loads(request.body)) == ("/v1/completions", {"prompt": "a", "stream": True})
    assert request.headers["authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (401, b"", f"requires a key: set {API_KEY}"),
        (400, b'{"error": {"message": "max_tokens\\nis -1"}}', "answers 400: max_tokens\\nis -1"),
        (502, b"<html>", "answers 502: b'<html>'"),
        (200, b'data: {"error": {"message": "the target\\nis lost"}}\n\n', "ends with an error: the target\\nis lost"),
        (200, b'data: {"error": "lost"}\n\n', "ends with an error: lost"),
        (200, b"data: {\n\n", "does not answer as expected"),
        (200, b"data: 1\n\n", "an event is not a JSON object"),
    ],
)
def test_another_answer_is_explained(server: AnsweringServer, status: int, body: bytes, message: str) -> None:
    server.answer = lambda request: HttpAnswer(body, status)
    with pytest.raises(ConfigurationError) as raised:
        list(stream_events(server.url, "/v1/completions", {}))
    assert message in str(raised.value)
    assert server.url in str(raised.value)


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://127.0.0.1", "http://", "http://[::1", "http://a:b", "http://a:99999"]
)
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="is not http://host:port"):
        list(stream_events(url, "/v1/completions", {}))
