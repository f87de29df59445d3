"""The operators' endpoints, at an address of their own (`router.admin_listen`)."""

from __future__ import annotations

from typing import Annotated

from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from services.router.access.caller import name_of_caller
from services.router.access.first_checks import FirstChecks
from services.router.access.gate import AdminGate, Credentials
from services.router.errors import error_handlers, invalid_request
from services.router.http.body import read_admin_call
from services.router.metrics import RouterMetrics
from services.router.operators.adapters import AdapterCalls
from services.router.operators.health import Health
from services.router.operators.routing import RoutingCall
from services.router.operators.switch import SpeculationSwitch


class _Change(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    percentage: Annotated[float, Field(ge=0, le=100)]
    reason: Annotated[str, Field(max_length=500)] = ""


def create_admin_app(
    switch: SpeculationSwitch,
    metrics: RouterMetrics,
    credentials: Credentials | None = None,
    adapters: AdapterCalls | None = None,
    health: Health | None = None,
    routing: RoutingCall | None = None,
) -> Starlette:
    """Returns the application of `/admin/speculation`, the calls of `adapters` and `routing`, `/health` and `/metrics`.

    `credentials`: the allowed callers; None: everyone.
    """
    allowed = credentials or Credentials()

    def state() -> Response:
        return JSONResponse({"percentage": switch.percentage})

    async def show(_: Request) -> Response:
        return state()

    async def change(request: Request) -> Response:
        try:
            asked = _Change.model_validate(await read_admin_call(request))
        except ValidationError as error:
            raise invalid_request(error) from error
        switch.set(abs(asked.percentage), caller=name_of_caller(request.scope), reason=asked.reason)
        return state()

    async def metrics_page(_: Request) -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return Starlette(
        routes=[
            Route("/admin/speculation", show, methods=["GET"]),
            Route("/admin/speculation", change, methods=["PUT"]),
            *(adapters.routes() if adapters is not None else ()),
            *(routing.routes() if routing is not None else ()),
            *([Route("/health", health.admin, methods=["GET"])] if health is not None else []),
            Route("/metrics", metrics_page, methods=["GET"]),
        ],
        middleware=[Middleware(FirstChecks, sites=allowed.admin_sites), Middleware(AdminGate, credentials=allowed)],
        exception_handlers=error_handlers(),
    )
