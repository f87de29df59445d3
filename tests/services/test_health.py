"""Tests of `outrider health` with a router that answers whatever a case says."""

from __future__ import annotations

import json

import pytest

from services import cli
from tests.http_server import HttpAnswer, HttpRequest, answering

pytestmark = pytest.mark.usefixtures("own_logging")

NOT_LISTED = "its targets are not listed; a router with keys lists them for one in OUTRIDER_API_KEY"


@pytest.mark.parametrize(
    ("status", "health", "lines"),
    [
        (200, {"targets": [{"address": "a:1", "status": "up", "problem": None}]}, ["1 of 1 targets are up"]),
        (
            503,
            {"targets": [{"address": "a:1", "status": "down", "problem": "no\x1b"}, {"status": "up", "problem": None}]},
            ["1 of 2 targets are up", "  a:1 is down: no\\x1b"],
        ),
        (200, {"status": "ok"}, [NOT_LISTED]),
        (200, [1], [NOT_LISTED]),
    ],
)
def test_the_targets_that_are_not_up_are_listed(
    status: int, health: object, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(request: HttpRequest) -> HttpAnswer:
        if request.path == "/health/live":
            return HttpAnswer('{"status": "ok"}')
        return HttpAnswer(json.dumps(health), status)

    with answering(answer) as server:
        assert cli.main(["health", server.url]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{server.url} answers", *lines]
