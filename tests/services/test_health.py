"""Tests of `outrider health` with a router that answers whatever a case says."""

from __future__ import annotations

import http.server
import json
import threading

import pytest

from services import cli

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
    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_live = self.path == "/health/live"
            content = json.dumps({"status": "ok"} if is_live else health).encode()
            self.send_response(200 if is_live else status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert cli.main(["health", url]) == 0
        server.shutdown()
        thread.join()
    assert capsys.readouterr().out.splitlines() == [f"{url} answers", *lines]
