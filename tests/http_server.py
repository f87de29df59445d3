"""An HTTP server for tests: answers as a function says, in threads of the test's process."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple


class HttpRequest(NamedTuple):
    method: str
    path: str
    headers: Message
    body: bytes


class HttpAnswer(NamedTuple):
    body: bytes | str = b""
    status: int = 200
    headers: Mapping[str, str] = {}


class AnsweringServer(ThreadingHTTPServer):
    """`requests`: all so far, in the order of their arrival. `answer` may be replaced at any time."""

    daemon_threads = True

    def __init__(self, answer: Callable[[HttpRequest], HttpAnswer]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.requests: list[HttpRequest] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


@contextmanager
def answering(
    answer: Callable[[HttpRequest], HttpAnswer], context: ssl.SSLContext | None = None
) -> Iterator[AnsweringServer]:
    """Starts a server; with a `context` it speaks TLS."""
    with AnsweringServer(answer) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
            server.url = f"https://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: AnsweringServer

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", "0")))
        request = HttpRequest(self.command, self.path, self.headers, body)
        self.server.requests.append(request)
        answer = self.server.answer(request)
        content = answer.body if isinstance(answer.body, bytes) else answer.body.encode()
        self.send_response(answer.status)
        for name, value in {"content-length": str(len(content)), **answer.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None: ...
