"""Operator call that changes how the router chooses targets, at `/admin/routing`.

Running requests keep their targets.
"""

from __future__ import annotations

import logging
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from services.router.access.caller import name_of_caller
from services.router.errors import invalid_request
from services.router.http.body import read_admin_call
from services.router.targets.affinity import Routing
from services.router.targets.replicas import ReplicaPool

audit = logging.getLogger("outrider.audit")


class _Change(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    routing: Routing
    reason: Annotated[str, Field(max_length=500)] = ""


class RoutingCall:
    """Shows and sets `ReplicaPool.routing`."""

    def __init__(self, pool: ReplicaPool) -> None:
        self._pool = pool

    def routes(self) -> list[Route]:
        return [
            Route("/admin/routing", self._show, methods=["GET"]),
            Route("/admin/routing", self._change, methods=["PUT"]),
        ]

    async def _show(self, _: Request) -> Response:
        return JSONResponse({"routing": self._pool.routing})

    async def _change(self, request: Request) -> Response:
        try:
            asked = _Change.model_validate(await read_admin_call(request))
        except ValidationError as error:
            raise invalid_request(error) from error
        caller, before = name_of_caller(request.scope), self._pool.routing
        audit.warning("audit: routing %s, was %s; set by %s, reason: %r", asked.routing, before, caller, asked.reason)
        self._pool.routing = asked.routing
        return await self._show(request)
