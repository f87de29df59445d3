"""What the router answers to whoever runs it, at an address of its own (`router.admin_listen`)."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from services.router.api_request import invalid_request
from services.router.body import read_json_object
from services.router.errors import error_handlers
from services.router.switch import SpeculationSwitch

_MAX_BODY_BYTES = 65_536


class _Change(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    percentage: Annotated[float, Field(ge=0, le=100)]
    reason: Annotated[str, Field(max_length=500)] = ""


def create_admin_app(switch: SpeculationSwitch) -> Starlette:
    """GET and PUT `/admin/speculation`."""

    def state() -> Response:
        return JSONResponse({"percentage": switch.percentage})

    async def show(_: Request) -> Response:
        return state()

    async def change(request: Request) -> Response:
        try:
            asked = _Change.model_validate(await read_json_object(request, _MAX_BODY_BYTES))
        except ValidationError as error:
            raise invalid_request(error) from error
        caller = request.client.host if request.client else "unknown"
        switch.set(abs(asked.percentage), caller=caller, reason=asked.reason)
        return state()

    return Starlette(
        routes=[
            Route("/admin/speculation", show, methods=["GET"]),
            Route("/admin/speculation", change, methods=["PUT"]),
        ],
        exception_handlers=error_handlers(),
    )
