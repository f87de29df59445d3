"""The router's replica. It is also the application's ingress: Serve's proxy passes requests to its router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from services.http_call import pinned_context
from services.launch.ray.replica import ProgramReplica

# Headers of one connection, not of the message (RFC 9110, 7.6.1); lengths are those of the forwarded bodies.
_HOP_BY_HOP = {
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
}


class RouterReplica(ProgramReplica):
    _session: aiohttp.ClientSession | None = None

    async def __call__(self, request: Request) -> Response:
        """Forwards a request and streams its answer. If the client disconnects, the router is notified."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
                connector=aiohttp.TCPConnector(limit=0),
            )
        # Read for each call: a router whose certificate was renewed uses the new one.
        context = await asyncio.to_thread(pinned_context, self._config.router.tls_certificate_file)
        router = self._config.router
        url = f"{router.scheme}://{self._address}{request.url.path}"
        try:
            answer = await self._session.request(
                request.method,
                url + (f"?{request.url.query}" if request.url.query else ""),
                headers=[(key, value) for key, value in request.headers.items() if key not in _HOP_BY_HOP],
                data=await request.body() or None,
                allow_redirects=False,
                ssl=True if context is None else context,
            )
        except aiohttp.ClientError:  # includes a changed certificate
            return Response("the router does not answer; retry", status_code=503, headers={"retry-after": "5"})
        reply = StreamingResponse(_chunks(answer), status_code=answer.status)
        for key, value in answer.headers.items():
            if key.lower() not in _HOP_BY_HOP:
                reply.headers.append(key, value)
        return reply


async def _chunks(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    try:
        async for chunk in answer.content.iter_any():
            yield chunk
    finally:
        answer.close()
