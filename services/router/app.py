"""Builds the router's ASGI application from a configuration."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import importlib.metadata
import logging
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cluster.config import Config
from cluster.errors import ConfigurationError
from cluster.model_folder import ASSETS, resolve_model_folder
from cluster.placement.endpoints import follow_addresses
from cluster.telemetry.tracing import make_tracer
from cluster.tokenization import Tokenizer
from cluster.transport.dialing import Dialer
from services.router.access.access_log import AccessLog
from services.router.access.first_checks import FirstChecks
from services.router.access.gate import Credentials, Gate
from services.router.access.key_limits import KeyLimits
from services.router.anthropic.endpoint import COUNT_TOKENS_PATH, Messages
from services.router.anthropic_errors import MESSAGES_PATH
from services.router.api.completions import Completions
from services.router.api.endpoint import Serving
from services.router.api.sampling_defaults import sampling_defaults
from services.router.chat.endpoint import ChatCompletions
from services.router.chat.prompt import ChatPrompts
from services.router.chat.readers import Readers
from services.router.chat.template import ChatTemplate
from services.router.chat.tokens import TOKEN_PATHS, Tokens
from services.router.errors import error_handlers
from services.router.http.loop_turns import BeginsInTurn, LoopTurns
from services.router.http.middleware import Admission, RequestIds
from services.router.http.tracing import Tracing
from services.router.metrics import RouterMetrics
from services.router.openapi.routes import OpenApi
from services.router.operators.adapters import AdapterCalls
from services.router.operators.health import Health
from services.router.operators.metrics_page import MetricsCall
from services.router.operators.pool_metrics import PoolMetrics
from services.router.operators.routing import RoutingCall
from services.router.operators.switch import SpeculationSwitch
from services.router.operators.traffic_log import TrafficLog
from services.router.page.feed import Feed
from services.router.page.routes import StatusPage
from services.router.page.workers import Workers
from services.router.responses.endpoint import INPUT_TOKENS_PATH, RESPONSES_PATH, Responses
from services.router.targets.prompt_budget import GivesBack, PromptBudget
from services.router.targets.replicas import ReplicaPool

logger = logging.getLogger(__name__)

_COMPLETIONS_PATH = "/v1/completions"
_CHAT_PATH = "/v1/chat/completions"
_GENERATING_PATHS = frozenset({_COMPLETIONS_PATH, _CHAT_PATH, RESPONSES_PATH, MESSAGES_PATH})
_PROBED_PATH = "/"  # probed by agents, with HEAD and without a key


def create_app(config: Config) -> Starlette:
    """Returns the ASGI application for `config`.

    Its `state` has the parts that the operators' application needs: `switch`, `adapters`, `routing`, `metrics`,
    `credentials`, `health`. It also has `feed`, which must be closed before the server waits for its requests to end.
    """
    if not config.target.addresses:
        raise ConfigurationError("no target to call: set `target.addresses` to [host:port, ...]")
    folder = resolve_model_folder(config.target.model)
    tokenizer = Tokenizer(folder)
    model_id = config.served_model_id
    for name in (model_id, *config.model_aliases):
        if name in config.target.lora:
            raise ConfigurationError(
                f"target.lora has an adapter called {name!r}, which is a name of the model: rename it, or set "
                "router.served_model_name"
            )
    metrics = RouterMetrics(model_id)
    pool = ReplicaPool(
        follow_addresses(config.target.addresses),
        tokenizer.fingerprint(),
        allow_different=config.router.allow_different_targets,
        routing=config.router.routing,
        dialer=Dialer.of(config.tls, "router", config.target.tls_server_name),
    )
    metrics.registry.register(PoolMetrics(pool, metrics, model_id))
    serving = Serving(
        model_id=model_id,
        tokenizer=tokenizer,
        pool=pool,
        metrics=metrics,
        feed=Feed(Workers(pool).observe),
        switch=SpeculationSwitch(config.router.speculation_percentage, metrics),
        budget=PromptBudget(config.router.max_waiting_tokens, metrics),
        salts_by_key=config.router.cache_salt == "key",
        max_body_bytes=config.router.max_body_bytes,
        max_pause_seconds=config.router.max_pause_seconds,
        traffic=TrafficLog.of(config.router),
        sampling_defaults=sampling_defaults(config.target, folder),
        aliases=config.model_aliases,
    )

    is_traced = config.tracing.endpoint is not None
    credentials = Credentials.of(config.router, os.environ)
    tracer = make_tracer(config.tracing, "outrider-router", f"{config.router.host}:{config.router.port}")

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        following = asyncio.create_task(credentials.follow())
        async with serving.pool:
            yield
        following.cancel()
        if serving.traffic is not None:
            serving.traffic.close()
        tracer.close()

    template, problem = _chat_template(config.router.chat_template, folder)
    prompts = ChatPrompts(template, tokenizer, problem)
    health = Health(serving.pool, model_id)
    page = (
        StatusPage(serving.feed, lambda: _hello(serving, template is not None, folder))
        if config.router.has_page
        else None
    )
    readers, turns = Readers.of(config.router, template, tokenizer), LoopTurns()
    app = Starlette(
        routes=[
            Route(_COMPLETIONS_PATH, Completions(serving).create, methods=["POST"]),
            Route(_CHAT_PATH, ChatCompletions(serving, prompts, readers).create, methods=["POST"]),
            *Responses(serving, prompts, readers).routes(),
            *Messages(serving, prompts, readers).routes(),
            *Tokens(serving, prompts).routes(),
            *_information_routes(serving, health, config.target.model),
            *OpenApi(importlib.metadata.version("outrider")).routes(),
            *(page.routes() if page is not None else [_root()]),
        ],
        middleware=[
            Middleware(RequestIds),
            Middleware(AccessLog),
            Middleware(FirstChecks, sites=credentials.public_sites),
            Middleware(
                Gate,
                credentials=credentials,
                limits=KeyLimits(config.router.requests_per_minute_per_key, config.router.max_requests_per_key),
                metrics=metrics,
                turns=turns,
                open_routes=frozenset({_PROBED_PATH}) | (page.open_routes if page is not None else frozenset()),
            ),
            *([Middleware(Tracing, routes=_GENERATING_PATHS, tracer=tracer)] if is_traced else []),
            Middleware(
                Admission,
                routes=_GENERATING_PATHS | TOKEN_PATHS | {COUNT_TOKENS_PATH, INPUT_TOKENS_PATH},
                config=config.router,
                metrics=serving.metrics,
            ),
            Middleware(BeginsInTurn, turns=turns),
            Middleware(GivesBack, budget=serving.budget),
        ],
        exception_handlers=error_handlers(),
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.switch, app.state.metrics, app.state.credentials = serving.switch, metrics, credentials
    app.state.adapters, app.state.health = AdapterCalls(serving.pool, model_id), health
    app.state.routing = RoutingCall(serving.pool)
    app.state.feed = serving.feed
    if origins := config.router.cors_allow_origins:
        # Wraps everything, including the answer to an internal error: without these headers a page cannot read it.
        app.middleware_stack = CORSMiddleware(
            app.build_middleware_stack(),
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            allow_private_network=True,
            expose_headers=[
                "retry-after",
                "x-client-request-id",
                "x-outrider-seed",
                "x-outrider-warning",
                "x-request-id",
            ],
        )
    return app


def _chat_template(file: str | None, folder: Path) -> tuple[ChatTemplate | None, str | None]:
    """Returns the template of chats, and why there is none if it is broken: other requests need none.

    Raises ConfigurationError if `router.chat_template` (`file`) is broken.
    """
    if file is not None:
        try:
            source = Path(file).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"router.chat_template {file} cannot be read: {error}") from error
        try:
            return ChatTemplate.from_folder(folder, source), None
        except ConfigurationError as error:
            raise ConfigurationError(f"router.chat_template {file}: {error}") from error
    try:
        return ChatTemplate.from_folder(folder), None
    except ConfigurationError as error:
        logger.warning("chats are refused: %s; set router.chat_template", error)
        return None, "the model's chat template is broken"


def _hello(serving: Serving, has_chat: bool, folder: Path) -> dict[str, Any]:
    """Returns the first event of the page: the model, and the page's features."""
    limits = serving.pool.limits() if serving.pool.usable else None
    return {
        "model": serving.model_id,
        "version": importlib.metadata.version("outrider"),
        "has_chat": has_chat,
        "is_bundled": folder.is_relative_to(ASSETS),
        "max_speculative_tokens": 0 if limits is None else limits.max_speculative_tokens,
    }


def _root() -> Route:
    """Returns the route that answers probes of `/` on a router without a page."""

    async def answer(request: Request) -> Response:
        if request.method != "HEAD":
            raise HTTPException(404)
        return Response()

    return Route(_PROBED_PATH, answer, methods=["GET"], include_in_schema=False)


def _information_routes(serving: Serving, health: Health, root: str) -> list[Route]:
    """Returns the routes that describe the model and the router.

    `root`: the configured name or path of the model.
    """
    created = int(time.time())
    version = importlib.metadata.version("outrider")
    pool = serving.pool

    def describe_model(name: str) -> dict[str, Any]:
        meant = serving.aliases.get(name, name)
        adapter = None if meant == serving.model_id else meant
        model: dict[str, Any] = {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "outrider",
            "root": adapter or root,
            "parent": None if adapter is None else serving.model_id,
            "type": "model",  # this and the next two: in Anthropic's API
            "display_name": name,
            "created_at": datetime.datetime.fromtimestamp(created, datetime.UTC).isoformat(),
        }
        if not pool.usable:
            return model
        max_model_len = pool.limits().max_model_len
        return model | {"max_model_len": max_model_len, "context_length": max_model_len}

    async def list_models(_: Request) -> Response:
        known = {serving.model_id, *pool.adapters()}
        aliases = {alias for alias, name in serving.aliases.items() if name in known}
        models = [describe_model(name) for name in (serving.model_id, *sorted((known | aliases) - {serving.model_id}))]
        ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"], "has_more": False}  # in Anthropic's API
        return JSONResponse({"object": "list", "data": models, **ends})

    async def show_model(request: Request) -> Response:
        name = request.path_params["model"]
        serving.check_model(name)
        return JSONResponse(describe_model(name))

    async def live(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ping(_: Request) -> Response:  # the same as vLLM's, which some platforms call instead of /health
        return Response(status_code=200 if health.is_ready else 503)

    async def version_page(_: Request) -> Response:
        return JSONResponse({"version": version})

    return [
        Route("/v1/models", list_models, methods=["GET"]),
        Route("/v1/models/", list_models, methods=["GET"], include_in_schema=False),
        Route("/v1/models/{model:path}", show_model, methods=["GET"]),  # names on the hub have a slash
        Route("/health", health.public, methods=["GET"]),
        Route("/health/live", live, methods=["GET"]),
        Route("/ping", ping, methods=["GET", "POST"]),
        Route("/metrics", MetricsCall(serving.metrics).show, methods=["GET"]),
        Route("/version", version_page, methods=["GET"]),
    ]
