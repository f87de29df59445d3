"""One line of the log for every request, whatever became of it."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from typing import Any

import grpc
import httpx
import pytest

from tests.waiting import wait_until

from .conftest import Router, ScriptedTarget

Lines = Callable[[int], list[dict[str, Any]]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """Function that waits for `count` requests in the log, and returns their fields. It asserts there are no more."""
    caplog.set_level(logging.INFO, logger="outrider.access")

    def read(count: int) -> list[dict[str, Any]]:
        def found() -> list[dict[str, Any]]:
            return [record.fields for record in caplog.records if record.name == "outrider.access"]  # type: ignore[attr-defined]

        wait_until(lambda: len(found()) >= count)
        assert len(found()) == count
        return found()

    return read


def test_sizes_times_acceptance_and_outcome(router: Router, lines: Lines) -> None:
    headers = {"x-request-id": "mine"}
    body = {"prompt": [[70, 71, 72], [73]], "n": 2, "max_tokens": 3, "seed": 5}
    answer = router.client.post("/v1/completions", json=body, headers=headers).json()
    (line,) = lines(1)
    assert f"cmpl-{line.pop('request_id')}" == answer["id"]
    seconds, first = line.pop("seconds"), line.pop("seconds_to_first_token")
    assert 0 < first <= seconds < 60
    assert line == {
        "client_request_id": "mine",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "outcome": 200,
        "client": "127.0.0.1",
        "id": answer["id"],
        "model": router.model,
        "stream": False,
        "choices": 4,
        "seed": 5,
        "prompt_tokens": 4,
        "generated_tokens": 12,
        "drafted_tokens": 48,
        "accepted_tokens": 36,
        "finish_reasons": {"length": 4},
    }


def test_the_drawn_seed_of_a_stream_and_no_text(router: Router, lines: Lines, caplog: pytest.LogCaptureFixture) -> None:
    messages = [{"role": "user", "content": "the quick brown fox"}]
    events = router.stream_chat(messages=messages, max_tokens=20, user="someone")
    (line,) = lines(1)
    assert (line["stream"], line["seed"], line["path"]) == (True, events[0]["seed"], "/v1/chat/completions")
    assert "quick" not in json.dumps([record.__dict__ for record in caplog.records], default=str)


def test_the_routers_own_id_reaches_the_target(router: Router, target: ScriptedTarget, lines: Lines) -> None:
    headers = {"x-request-id": "mine"}
    answer = router.client.post("/v1/completions", json={"prompt": [70]}, headers=headers)
    drawn = router.complete(prompt=[70])
    own = router.client.post("/v1/completions", json={"prompt": [70], "request_id": "own"}, headers=headers)
    ids = [reply.json()["id"] for reply in (answer, drawn, own)]
    assert ids == [f"cmpl-{reply.headers['x-request-id']}" for reply in (answer, drawn, own)]
    assert [request.request_id for request in target.requests] == ids
    assert [reply.headers.get("x-client-request-id") for reply in (answer, drawn, own)] == ["mine", None, "own"]
    assert [line.get("client_request_id") for line in lines(3)] == ["mine", None, "own"]


def test_refusals(router: Router, lines: Lines) -> None:
    router.complete(prompt="a secret word", temperature=9)
    router.complete(prompt="a secret word", model="none")
    router.client.get("/" + "x" * 1000)
    router.client.put("/v1/completions")
    asked, unknown, lost, wrong = lines(4)
    assert (asked["status"], asked["error"], asked["param"]) == (400, "invalid_request_error", "temperature")
    assert (unknown["outcome"], unknown["error"], unknown["param"]) == (404, "not_found_error", "model")
    assert (lost["status"], len(lost["path"])) == (404, 200)
    assert (wrong["method"], wrong["status"]) == ("PUT", 405)
    assert "secret" not in str(lines(4))
    assert all("generated_tokens" not in line for line in lines(4))


def test_nobody_to_answer(new_router: Callable[..., Router], lines: Lines) -> None:
    router = new_router(["127.0.0.1:1"], max_pause_seconds=0)
    assert router.complete(prompt=[70]).status_code == 503
    (line,) = lines(1)
    assert (line["outcome"], line["error"]) == (503, "unavailable_error")


def test_a_refusal_before_any_work(new_router: Callable[..., Router], target: ScriptedTarget, lines: Lines) -> None:
    target.hang_after = 1
    router = new_router([target.address], max_waiting_requests=1)
    with router.client.stream("POST", "/v1/completions", json={"prompt": [70], "stream": True}) as answer:
        pieces = answer.iter_raw()
        assert next(pieces)
        assert router.complete(prompt=[70]).status_code == 503
        (line,) = lines(1)
        assert (line["outcome"], line["error"]) == (503, "overloaded_error")


def test_a_client_that_leaves(router: Router, target: ScriptedTarget, lines: Lines) -> None:
    target.hang_after = 2
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(router.url + "/v1/completions", json={"prompt": [70]}, timeout=2)
    with router.client.stream("POST", "/v1/completions", json={"prompt": [70], "stream": True}) as answer:
        pieces = answer.iter_raw()
        assert next(pieces)
        assert next(pieces)
    whole, streamed = lines(2)
    assert (whole["outcome"], streamed["status"], streamed["outcome"]) == (499, 200, 499)
    assert (whole["generated_tokens"], streamed["finish_reasons"]) == (2, {})


def test_an_error_after_the_answer_has_begun(router: Router, target: ScriptedTarget, lines: Lines) -> None:
    target.fail_after, target.failure = 1, (grpc.StatusCode.INTERNAL, "secret")
    router.stream(prompt=[70, 71], max_tokens=5)
    (line,) = lines(1)
    assert (line["status"], line["outcome"], line["error"]) == (200, 500, "internal_error")
    assert line["generated_tokens"] == 1


def test_keys_are_named_and_not_shown(
    new_router: Callable[..., Router], target: ScriptedTarget, tmp_path, lines: Lines
) -> None:
    path = tmp_path / "keys"
    path.write_text(f"alice:sha256:{hashlib.sha256(b'one').hexdigest()}\n")
    router = new_router([target.address], api_keys_file=str(path))
    router.client.post("/v1/completions", json={"prompt": [70]}, headers={"authorization": "Bearer one"})
    router.client.post("/v1/completions", json={"prompt": [70]}, headers={"authorization": "Bearer two"})
    known, unknown = lines(2)
    assert (known["key"], known["outcome"]) == ("alice", 200)
    assert ("key" in unknown, unknown["outcome"], unknown["error"]) == (False, 401, "invalid_request_error")
    assert "two" not in str(unknown)


def test_probes_leave_none(router: Router, lines: Lines) -> None:
    for path in ("/health", "/health/live", "/ping", "/metrics", "/version"):
        router.client.get(path)
    (line,) = lines(1)
    assert line["path"] == "/version"
