"""Limits the prompt tokens in the router, and those of one request at targets.

A request's prompts stay in the router's memory until it has ended; its choices share them. A target holds them once for
each choice. So only a limited number of a request's tokens wait at targets; its other choices wait in the router, where
each costs only a number.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.errors import InvalidRequestError, OverloadedError
from services.router.http.current_key import current_key
from services.router.metrics import RouterMetrics
from services.shared_limit import SharedLimit

MAX_WAITING_TOKENS_AT_TARGETS = 2**18
"Limit of one request's choices without a token. Two prompts of 131k tokens, or a thousand of 256, wait at once."


class PromptBudget:
    """Counts and limits the prompt tokens of all requests in flight. Not thread-safe."""

    def __init__(self, limit: int, metrics: RouterMetrics) -> None:
        self._tokens = SharedLimit(limit)
        self._metrics = metrics

    def take(self, scope: Mapping[str, Any], num_tokens: int, param: str) -> None:
        """Counts the prompt tokens of the request of `scope` until `GivesBack` releases them.

        `param`: the field of the prompts. Raises InvalidRequestError if they alone exceed the limit, and
        OverloadedError if they do not fit now.
        """
        limit, key = self._tokens.limit, current_key.get()
        if num_tokens > limit:
            raise InvalidRequestError(
                f"{param} has {num_tokens} tokens in all, and this router accepts {limit} at once", param=param
            )
        if not self._tokens.has_room(key, num_tokens):
            self._metrics.count_rejection("max_num_queued_tokens")
            raise OverloadedError(
                f"requests in flight have {self._tokens.held} prompt tokens already, of {limit}; retry later"
            )
        self._tokens.take(key, num_tokens)
        scope["state"]["num_budgeted_tokens"] = num_tokens

    def give_back(self, scope: Mapping[str, Any]) -> None:
        """Gives back the tokens that the request of `scope` took, if any."""
        self._tokens.give_back(current_key.get(), scope["state"].pop("num_budgeted_tokens", 0))


class GivesBack:
    """Middleware that releases the prompt tokens of each request when it ends."""

    def __init__(self, app: ASGIApp, *, budget: PromptBudget) -> None:
        self._app = app
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            if scope["type"] == "http":
                self._budget.give_back(scope)


class StartWindow:
    """Starts the choices of one request in order, and limits its tokens waiting at targets.

    A choice waits from its start to its first token. One choice may always wait, even if it exceeds the limit.
    """

    def __init__(self, limit: int = MAX_WAITING_TOKENS_AT_TARGETS) -> None:
        self.has_begun = False  # whether any choice has got a token
        self._limit = limit
        self._num_tokens = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def place(self, num_tokens: int) -> AsyncIterator[StartPlace]:
        """Waits for a place for a choice of `num_tokens`.

        The choice gives up the place at its first token and continues without one.
        """
        await self._enter(num_tokens)
        place = StartPlace(self, num_tokens)
        try:
            yield place
        finally:
            place.leave()

    async def _enter(self, num_tokens: int) -> None:
        if not self._queue and self._fits(num_tokens):
            self._num_tokens += num_tokens
            return
        turn = asyncio.get_running_loop().create_future()
        self._queue.append((num_tokens, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the choice may have got its turn at the moment when it was cancelled
                self.leave(num_tokens)
            raise

    def leave(self, num_tokens: int) -> None:
        """Releases the place of a choice of `num_tokens`, and lets the next ones begin."""
        self._num_tokens -= num_tokens
        while self._queue:
            wanted, turn = self._queue[0]
            if not turn.cancelled():
                if not self._fits(wanted):
                    return
                self._num_tokens += wanted
                turn.set_result(None)
            self._queue.popleft()

    def _fits(self, num_tokens: int) -> bool:
        return not self._num_tokens or self._num_tokens + num_tokens <= self._limit


class StartPlace:
    """The place of one choice among those that wait at targets."""

    def __init__(self, window: StartWindow, num_tokens: int) -> None:
        self._window = window
        self._num_tokens = num_tokens
        self._is_left = False

    def begin(self) -> None:
        """Records that the choice has its first token."""
        self._window.has_begun = True
        self.leave()

    def leave(self) -> None:
        if not self._is_left:
            self._is_left = True
            self._window.leave(self._num_tokens)
