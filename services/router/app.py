"""The router's routes, put together from a configuration."""

from __future__ import annotations

import contextlib
import importlib.metadata
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cluster.config import Config
from cluster.errors import ConfigurationError
from cluster.model_folder import resolve_model_folder
from cluster.telemetry.metrics import RouterMetrics
from cluster.tokenization import Tokenizer
from services.router.completions import Completions
from services.router.errors import install_error_handlers
from services.router.middleware import Admission, RequestIds
from services.router.targets import Target, TargetPool

_GENERATING_PATHS = frozenset({"/v1/completions"})


def create_app(config: Config) -> FastAPI:
    """The ASGI application. Raises ConfigurationError when there is no tokenizer or no target to call.

    Targets need not be up: `/health` says 503 until one is.
    """
    if not config.target.addresses:
        raise ConfigurationError("no target to call: set `target.addresses` to [host:port, ...]")
    tokenizer = Tokenizer(resolve_model_folder(config.target.model))
    model_id = served_model_id(config.target.model)
    metrics = RouterMetrics(model_id)
    pool = TargetPool(config.target.addresses, tokenizer.fingerprint())
    completions = Completions(model_id, tokenizer, pool, metrics, config.router.max_body_bytes)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with pool:
            yield

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_middleware(
        Admission,
        paths=_GENERATING_PATHS,
        limit=config.router.max_waiting_requests,
        metrics=metrics,
    )
    app.add_middleware(RequestIds)
    install_error_handlers(app)
    app.add_route("/v1/completions", completions.create, methods=["POST"])
    _add_information_routes(app, model_id, pool, metrics)
    return app


def served_model_id(model: str) -> str:
    """The name clients use: `model` as configured, or the folder's name when it is a path."""
    path = Path(model).expanduser()
    if model.startswith((".", "/", "~")) or path.is_dir():
        return path.resolve().name
    return model


def _add_information_routes(app: FastAPI, model_id: str, pool: TargetPool, metrics: RouterMetrics) -> None:
    created = int(time.time())
    version = importlib.metadata.version("outrider")

    async def list_models(_: Request) -> Response:
        model: dict[str, Any] = {
            "id": model_id,
            "object": "model",
            "created": created,
            "owned_by": "outrider",
        }
        lengths = [target.description.model.max_model_len for target in pool.usable if target.description is not None]
        if lengths:
            model["max_model_len"] = min(lengths)
        return JSONResponse({"object": "list", "data": [model]})

    async def health(_: Request) -> Response:
        targets = [_describe(target) for target in pool.targets]
        if pool.usable:
            return JSONResponse({"status": "ok", "model": model_id, "targets": targets})
        reasons = [f"target {target.address}: {target.problem}" for target in pool.targets]
        body = {"status": "unavailable", "model": model_id, "targets": targets}
        return JSONResponse(body | {"reason": "; ".join(reasons)}, status_code=503, headers={"retry-after": "1"})

    async def metrics_page(_: Request) -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    async def version_page(_: Request) -> Response:
        return JSONResponse({"version": version})

    app.add_route("/v1/models", list_models, methods=["GET"])
    app.add_route("/health", health, methods=["GET"])
    app.add_route("/metrics", metrics_page, methods=["GET"])
    app.add_route("/version", version_page, methods=["GET"])


def _describe(target: Target) -> dict[str, Any]:
    """A target's entry in `/health`."""
    entry: dict[str, Any] = {"address": target.address, "problem": target.problem}
    description = target.description
    if description is not None:
        entry |= {
            "model": description.model.name,
            "num_draft_links": description.num_draft_links,
            "num_draft_links_configured": description.num_draft_links_configured,
            "running": description.load.num_running,
            "waiting": description.load.num_waiting,
        }
    return entry
