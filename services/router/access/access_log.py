"""One log line per ended request: caller, size, duration and outcome.

It contains no text of a prompt or an answer. The log escapes texts that a client chooses, such as its request's ID.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from services.router.access.caller import caller_of
from services.router.http.middleware import request_id_of, route_of
from services.router.http.streaming import NotedSend

access = logging.getLogger("outrider.access")

MAX_PATH_CHARACTERS = 200
# Routes that monitoring polls every few seconds.
_WATCHED_ROUTES = frozenset({"/health", "/health/live", "/ping", "/metrics"})


@dataclass(slots=True)
class RequestRecord:
    """Facts about a request, filled in while it is answered."""

    arrived_at: float = field(default_factory=time.perf_counter)
    id: str | None = None  # ID of the answer
    model: str | None = None
    adapter: str | None = None
    stream: bool | None = None
    num_choices: int | None = None
    num_prompt_tokens: int | None = None
    seed: int | None = None
    num_generated_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    first_token_at: float | None = None
    num_moves: int = 0  # moves of its choices to other targets
    finish_reasons: Counter[str] = field(default_factory=Counter)  # reasons of its choices

    def count_tokens(self, count: int, at: float) -> None:
        """Counts `count` generated tokens that arrived at `at`, in seconds (time.perf_counter)."""
        self.num_generated_tokens += count
        if self.first_token_at is None:
            self.first_token_at = at

    def count_round(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens

    def fields(self) -> dict[str, Any]:
        """Returns the fields of the log line by name; fields without a value are omitted."""
        found: dict[str, Any] = {
            "id": self.id,
            "model": self.model,
            "adapter": self.adapter,
            "stream": self.stream,
            "choices": self.num_choices,
            "seed": self.seed,
            "prompt_tokens": self.num_prompt_tokens,
        }
        if self.id is not None:
            first = self.first_token_at
            found |= {
                "generated_tokens": self.num_generated_tokens,
                "drafted_tokens": self.num_draft_tokens,
                "accepted_tokens": self.num_accepted_tokens,
                "seconds_to_first_token": None if first is None else round(first - self.arrived_at, 6),
                "moves": self.num_moves or None,
                "finish_reasons": dict(sorted(self.finish_reasons.items())),
            }
        return {name: value for name, value in found.items() if value is not None}


def record_of(scope: Mapping[str, Any]) -> RequestRecord:
    """Returns the record of the request of `scope`."""
    record: RequestRecord = scope["state"]["record"]
    return record


class AccessLog:
    """Middleware that logs each request when it ends; must be inside `RequestIds`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = scope["state"]["record"] = RequestRecord()
        noted = NotedSend(send)
        try:
            await self._app(scope, receive, noted)
        finally:
            level = logging.DEBUG if route_of(scope) in _WATCHED_ROUTES else logging.INFO
            if access.isEnabledFor(level):
                access.log(level, "request", extra={"fields": _fields(scope, noted.status, record)})


def _fields(scope: Scope, status: int | None, record: RequestRecord) -> dict[str, Any]:
    """Returns the fields of the log line. `status`: HTTP status that was sent, if any."""
    state, caller, client = scope["state"], caller_of(scope), scope.get("client")
    fields = {
        "request_id": request_id_of(scope),
        "client_request_id": state.get("client_request_id"),
        "method": scope["method"],
        "path": scope["path"][:MAX_PATH_CHARACTERS],
        "status": status,
        "outcome": state.get("outcome", status or 500),
        **state.get("error", {}),
        "client": client[0] if client else None,
        "key": caller.name if caller is not None else None,
        "seconds": round(time.perf_counter() - record.arrived_at, 6),
    }
    return {name: value for name, value in fields.items() if value not in (None, "")} | record.fields()
