"""Requests to Serve's proxy reach a router as they were sent."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from cluster.config import Config
from services.launch.ray.router_replica import RouterReplica
from tests.http_server import HttpAnswer, answering


def test_the_router_sees_which_site_is_called_and_from_which_page() -> None:
    """Serve's proxy may listen on this machine alone, like the router, which checks both."""
    with answering(lambda _: HttpAnswer("{}")) as server:

        async def call() -> None:
            replica = RouterReplica.__new__(RouterReplica)  # without the program, which Serve would start
            replica._config, replica._address = Config(), server.url.removeprefix("http://")
            headers = [(b"host", b"evil.example"), (b"origin", b"https://evil.example")]
            scope = {"type": "http", "method": "GET", "path": "/health", "query_string": b"", "headers": headers}

            async def receive() -> dict[str, object]:
                return {"type": "http.request", "body": b"", "more_body": False}

            assert (await replica(Request(scope, receive))).status_code == 200
            assert replica._session is not None
            await replica._session.close()

        asyncio.run(call())
        (request,) = server.requests
        assert request.headers.get_all("host") == ["evil.example"]
        assert request.headers.get_all("origin") == ["https://evil.example"]
