"""A small HTTP server that answers as an OpenAI-style one does, and a system that is one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from cluster.errors import UnavailableError
from services.prove.systems import Counters, System

TOKEN_SECONDS = 0.002


class _Handler(BaseHTTPRequestHandler):
    server: StubServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        token_ids = self.server.tokens_of(body)
        self.send_response(200)
        self.end_headers()
        usage = {"completion_tokens": len(token_ids)}
        if not body.get("stream"):
            self._send(json.dumps({"choices": [{"token_ids": token_ids}], "usage": usage}))
            return
        for token_id in token_ids:
            time.sleep(self.server.token_seconds)
            self._send(f"data: {json.dumps({'choices': [{'token_ids': [token_id]}]})}\n\n")
        self._send(f"data: {json.dumps({'choices': [{'token_ids': [], 'finish_reason': 'length'}]})}\n\n")
        self._send(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n")

    def _send(self, text: str) -> None:
        self.wfile.write(text.encode())
        self.wfile.flush()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def by_seed(body: dict[str, Any]) -> list[int]:
    """An answer that depends on the prompt and the seed alone."""
    return [(body["seed"] * 31 + place + len(body["prompt"])) % 997 for place in range(body["max_tokens"])]


class StubServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(
        self, tokens_of: Callable[[dict[str, Any]], list[int]] = by_seed, token_seconds: float = TOKEN_SECONDS
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.tokens_of = tokens_of
        self.token_seconds = token_seconds
        self.bodies: list[dict[str, Any]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class StubSystem(System):
    """Answers from a thread of this process; `events` has what happened to all systems."""

    def __init__(
        self,
        name: str,
        events: list[tuple[str, str]],
        tokens_of: Callable[[dict[str, Any]], list[int]] = by_seed,
        *,
        token_seconds: float = TOKEN_SECONDS,
        fails: bool = False,
        at_start: Callable[[], object] = lambda: None,
    ) -> None:
        self.name = name
        self.description = f"stub of {name}"
        self._events = events
        self._tokens_of = tokens_of
        self._token_seconds = token_seconds
        self._fails = fails
        self._at_start = at_start
        self._server: StubServer | None = None
        self._drafted = 0.0

    @property
    def is_running(self) -> bool:
        return self._server is not None

    def start(self) -> None:
        self._at_start()
        self._events.append(("start", self.name))
        if self._fails:
            raise UnavailableError("it does not start")
        self._server = StubServer(self._answer, self._token_seconds)
        self.url = self._server.url

    def wait_ready(self) -> None:
        self._events.append(("wait", self.name))

    def stop(self, is_hurried: Callable[[], bool]) -> None:
        if self._server is not None:
            self._events.append(("stop", self.name))
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def counters(self) -> Counters | None:
        return None if self.name == "vllm serve" else Counters(self._drafted, self._drafted / 2)

    def _answer(self, body: dict[str, Any]) -> list[int]:
        self._events.append(("ask", self.name))
        if self.name in ("beside", "remote"):
            self._drafted += 4
        return self._tokens_of(body)
