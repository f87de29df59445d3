"""The route of the OpenAPI document, which is built at its first request."""

from __future__ import annotations

from functools import cached_property

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.router.http.security_headers import SECURITY_HEADERS
from services.router.openapi.document import openapi_document


class OpenApi:
    def __init__(self, version: str) -> None:
        self._version = version

    def routes(self) -> list[Route]:
        return [
            Route("/openapi.json", self._show_document, methods=["GET"]),
            Route("/docs", self._show_document, methods=["GET"]),
        ]

    @cached_property
    def _document(self) -> bytes:
        return to_json(openapi_document(self._version))

    async def _show_document(self, _: Request) -> Response:
        return Response(self._document, media_type="application/json", headers=SECURITY_HEADERS)
