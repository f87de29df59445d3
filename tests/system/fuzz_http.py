"""Fuzzer of HTTP: clients that break the protocol on purpose, on raw sockets, against a running cluster.

    python -m tests.system.fuzz_http --seconds 600

Meanwhile a client that behaves asks for the same stream repeatedly. None of its tokens may change, and no program may
end. At the end memory, files and places are what they were.
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
import socket
import time
from collections.abc import Callable

from services.launch.local import LocalCluster
from tests.system.conftest import READY_TIMEOUT_SECONDS, cluster_config
from tests.system.fuzzing import Figures, Resources, assert_nothing_kept, fuzz, programs, run_for_long

SETTINGS = (
    "router.header_timeout_seconds=1",
    "router.body_timeout_seconds=1",
    "router.idle_timeout_seconds=1",
    "router.max_connections=200",
)
_PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/tokenize",
    "/health",
    "/metrics",
    "/nothing",
)
_BODIES = (
    {"prompt": "def main(", "max_tokens": 8, "stream": True},
    {"prompt": "def main(", "max_tokens": 400, "ignore_eos": True, "stream": True, "logprobs": 20, "n": 4},
    {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8},
    {"input": "hi", "max_output_tokens": 8},
)
_MEMORY_BYTES = 64 * 2**20  # that a router may grow by


class Attacker:
    """One connection at a time."""

    def __init__(self, url: str, seed: int) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self._address = host, int(port)
        self._random = random.Random(seed)
        self.ways: tuple[Callable[[socket.socket], None], ...] = (
            self.random_bytes,
            self.mutated_request,
            self.half_a_request,
            self.large_headers,
            self.strange_chunks,
            self.sent_ahead,
            self.two_lengths,
            self.leaves,
            self.reads_slowly,
            self.upgrades,
        )

    def attack(self, figures: Figures) -> None:
        way = self._random.choice(self.ways)
        with socket.socket() as connection:
            connection.settimeout(5)
            if way == self.reads_slowly:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            status = ""
            with contextlib.suppress(OSError):
                connection.connect(self._address)
                way(connection)
                if self._random.random() < 0.7:
                    status = connection.recv(65_536)[:12].decode("latin-1")
        figures.did[way.__name__] += 1
        figures.answers[status if status.startswith("HTTP/") else ""] += 1

    def random_bytes(self, connection: socket.socket) -> None:
        connection.sendall(self._random.randbytes(self._random.choice((1, 10, 1000, 200_000))))

    def mutated_request(self, connection: socket.socket) -> None:
        request = bytearray(self._request())
        for _ in range(self._random.choice((1, 3, 10))):
            request[self._random.randrange(len(request))] = self._random.randrange(256)
        connection.sendall(request)

    def half_a_request(self, connection: socket.socket) -> None:
        request = self._request()
        for byte in request[: self._random.randrange(len(request))]:
            connection.sendall(bytes([byte]))
        if self._random.random() < 0.3:
            time.sleep(self._random.random() * 1.5)

    def large_headers(self, connection: socket.socket) -> None:
        number, size = self._random.choice(((1, 10_000_000), (100_000, 10), (100, 600), (128, 1), (129, 1)))
        connection.sendall(self._head(None, *(b"a%d: %b" % (index, b"x" * size) for index in range(number))))

    def strange_chunks(self, connection: socket.socket) -> None:
        body = json.dumps(self._random.choice(_BODIES)).encode()
        chunks = self._random.choice(
            (
                b"zz\r\n",
                b"-1\r\n",
                b"ffffffffffffffffff\r\n" + body,
                b"1;" + b"a" * 500_000,
                b"%x\r\n%b\r\n0\r\nx: %b\r\n\r\n" % (len(body), body, b"y" * self._random.choice((1, 500_000))),
                b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n",
                b"%x\n%b\n0\n\n" % (len(body), body),
            )
        )
        connection.sendall(self._head(None, b"transfer-encoding: chunked") + chunks)

    def sent_ahead(self, connection: socket.socket) -> None:
        connection.sendall(self._request() * self._random.choice((2, 5, 200)))

    def two_lengths(self, connection: socket.socket) -> None:
        second = self._random.choice(
            (
                b"content-length: 5",
                b"transfer-encoding: chunked",
                b"transfer-encoding: x, chunked",
                b"content-length: +3",
            )
        )
        connection.sendall(self._head(30, second) + b"0\r\n\r\nGET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")

    def leaves(self, connection: socket.socket) -> None:
        request = self._request()
        connection.sendall(request[: self._random.randrange(len(request)) if self._random.random() < 0.5 else None])
        for _ in range(self._random.randrange(3)):
            connection.recv(1024)
        if self._random.random() < 0.5:  # with a reset
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    def reads_slowly(self, connection: socket.socket) -> None:
        body = json.dumps(_BODIES[1]).encode()
        connection.sendall(self._head(len(body), path="/v1/completions") + body)
        until = time.monotonic() + self._random.random() * 3
        while time.monotonic() < until and connection.recv(64):
            time.sleep(0.05)

    def upgrades(self, connection: socket.socket) -> None:
        protocol = self._random.choice((b"h2c", b"websocket", b"x"))
        connection.sendall(self._request(b"connection: upgrade", b"upgrade: " + protocol) * 2)

    def _request(self, *headers: bytes) -> bytes:
        body = json.dumps(self._random.choice(_BODIES)).encode()
        return self._head(len(body), *headers) + body

    def _head(self, length: int | None, *headers: bytes, path: str = "") -> bytes:
        method = self._random.choice(("POST", "POST", "GET", "PUT"))
        lines = [
            f"{method} {path or self._random.choice(_PATHS)} HTTP/1.1".encode(),
            b"host: localhost",
            b"content-type: application/json",
            *headers,
        ]
        if length is not None:
            lines.append(b"content-length: %d" % length)
        return b"\r\n".join(lines) + b"\r\n\r\n"


def fuzz_router(url: str, seconds: float, *, seed: int, concurrency: int = 12) -> Figures:
    """Attacks the router at `url` for `seconds`. The figures include all failures."""
    figures = Figures()
    attackers = [Attacker(url, seed * 1000 + number) for number in range(concurrency)]
    fuzz(url, seconds, figures, [functools.partial(attacker.attack, figures) for attacker in attackers])
    return figures


def run(seconds: float, seed: int, *overrides: str) -> tuple[Figures, str]:
    """Starts a cluster, attacks it, and checks what is left. Returns the figures, and the router's resources."""
    with LocalCluster(cluster_config(*SETTINGS, *overrides)) as cluster:
        cluster.wait_ready(READY_TIMEOUT_SECONDS)
        fuzz_router(cluster.url, 1, seed=seed + 1)  # what is started with the first that needs it
        before, pids = Resources.of(cluster.router), [child.pid for child in programs(cluster)]
        figures = fuzz_router(cluster.url, seconds, seed=seed)
        assert_nothing_kept(cluster, {cluster.router: before}, pids, _MEMORY_BYTES)
        return figures, f"before {before}, after {Resources.of(cluster.router)}"


if __name__ == "__main__":
    raise SystemExit(run_for_long(__doc__, run))
