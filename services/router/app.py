"""The router's routes, put together from a configuration."""

from __future__ import annotations

import contextlib
import importlib.metadata
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cluster.config import Config
from cluster.errors import ConfigurationError
from cluster.model_folder import resolve_model_folder
from cluster.placement.endpoints import follow_addresses
from cluster.telemetry.metrics import RouterMetrics
from cluster.telemetry.tracing import make_tracer
from cluster.tokenization import Tokenizer
from services.router.chat import ChatCompletions
from services.router.chat_template import ChatTemplate
from services.router.completions import Completions
from services.router.endpoint import Serving
from services.router.errors import error_handlers
from services.router.middleware import Admission, RequestIds
from services.router.replicas import Replica, ReplicaPool
from services.router.switch import SpeculationSwitch
from services.router.tokens import TOKEN_PATHS, Tokens
from services.router.tracing import Tracing

_COMPLETIONS_PATH = "/v1/completions"
_CHAT_PATH = "/v1/chat/completions"
_GENERATING_PATHS = frozenset({_COMPLETIONS_PATH, _CHAT_PATH})


def create_app(config: Config) -> Starlette:
    """The ASGI application; its `state.switch` is the `SpeculationSwitch`. Raises ConfigurationError when there is no
    tokenizer or no target to call.

    Targets need not be up: `/health` says 503 until one is.
    """
    if not config.target.addresses:
        raise ConfigurationError("no target to call: set `target.addresses` to [host:port, ...]")
    folder = resolve_model_folder(config.target.model)
    tokenizer = Tokenizer(folder)
    model_id = config.router.served_model_name or (
        "simulated" if config.target.engine == "simulated" else served_model_id(config.target.model)
    )
    metrics = RouterMetrics(model_id)
    serving = Serving(
        model_id=model_id,
        tokenizer=tokenizer,
        pool=ReplicaPool(
            follow_addresses(config.target.addresses),
            tokenizer.fingerprint(),
            allow_different=config.router.allow_different_targets,
        ),
        metrics=metrics,
        switch=SpeculationSwitch(config.router.speculation_percentage, metrics),
        max_body_bytes=config.router.max_body_bytes,
        max_pause_seconds=config.router.max_pause_seconds,
    )

    is_traced = config.tracing.endpoint is not None
    tracer = make_tracer(config.tracing, "outrider-router", f"{config.router.host}:{config.router.port}")

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with serving.pool:
            yield
        tracer.close()

    template = ChatTemplate.from_folder(folder)
    app = Starlette(
        routes=[
            Route(_COMPLETIONS_PATH, Completions(serving).create, methods=["POST"]),
            Route(_CHAT_PATH, ChatCompletions(serving, template).create, methods=["POST"]),
            *Tokens(serving, template).routes(),
            *_information_routes(serving, config.target.model),
        ],
        middleware=[
            Middleware(RequestIds),
            *([Middleware(Tracing, paths=_GENERATING_PATHS, tracer=tracer)] if is_traced else []),
            Middleware(
                Admission,
                paths=_GENERATING_PATHS | TOKEN_PATHS,
                limit=config.router.max_waiting_requests,
                metrics=serving.metrics,
            ),
        ],
        exception_handlers=error_handlers(),
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.switch = serving.switch
    return app


def served_model_id(model: str) -> str:
    """The name clients use: `model` as configured, or the folder's name when it is a path."""
    path = Path(model).expanduser()
    if model.startswith((".", "/", "~")) or path.is_dir():
        return path.resolve().name
    return model


def _information_routes(serving: Serving, root: str) -> list[Route]:
    """`root`: the model as it is configured."""
    created = int(time.time())
    version = importlib.metadata.version("outrider")
    pool = serving.pool

    def describe_model() -> dict[str, Any]:
        model: dict[str, Any] = {
            "id": serving.model_id,
            "object": "model",
            "created": created,
            "owned_by": "outrider",
            "root": root,
            "parent": None,
        }
        return model | {"max_model_len": pool.limits().max_model_len} if pool.usable else model

    async def list_models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [describe_model()]})

    async def show_model(request: Request) -> Response:
        serving.check_model(request.path_params["model"])
        return JSONResponse(describe_model())

    async def health(_: Request) -> Response:
        targets = [_describe(replica) for replica in pool.replicas]
        if pool.usable:
            return JSONResponse({"status": "ok", "model": serving.model_id, "targets": targets})
        reasons = [f"target {replica.address}: {replica.problem}" for replica in pool.replicas]
        body = {"status": "unavailable", "model": serving.model_id, "targets": targets}
        return JSONResponse(body | {"reason": "; ".join(reasons)}, status_code=503, headers={"retry-after": "1"})

    async def live(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ping(_: Request) -> Response:  # as vLLM's, which some platforms ask for in place of /health
        return Response(status_code=200 if pool.usable else 503)

    async def metrics_page(_: Request) -> Response:
        return Response(serving.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    async def version_page(_: Request) -> Response:
        return JSONResponse({"version": version})

    return [
        Route("/v1/models", list_models, methods=["GET"]),
        Route("/v1/models/{model:path}", show_model, methods=["GET"]),  # names on the hub have a slash
        Route("/health", health, methods=["GET"]),
        Route("/health/live", live, methods=["GET"]),
        Route("/ping", ping, methods=["GET", "POST"]),
        Route("/metrics", metrics_page, methods=["GET"]),
        Route("/version", version_page, methods=["GET"]),
    ]


def _describe(replica: Replica) -> dict[str, Any]:
    """A replica's entry in `/health`."""
    entry: dict[str, Any] = {"address": replica.address, "status": replica.status, "problem": replica.problem}
    description = replica.description
    if description is not None:
        entry |= {
            "advertised_address": description.advertised_address or None,
            "wire_version": description.wire_version,
            "model": description.model.name,
            "num_draft_links": description.num_draft_links,
            "num_draft_links_configured": description.num_draft_links_configured,
            "running": description.load.num_running,
            "waiting": description.load.num_waiting,
        }
    return entry
