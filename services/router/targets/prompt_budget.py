"""How many prompt tokens the router holds at once, and how many of one request wait at targets.

A request's prompts stay in the router's memory until it has ended; its choices share them. What targets are asked for
they hold choice by choice, so a request has only so much of it wait there: its other choices wait here, as one number.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.errors import InvalidRequestError, OverloadedError

MAX_WAITING_TOKENS_AT_TARGETS = 2**18
"Limit of one request's choices without a token. Two prompts of 131k tokens, or a thousand of 256, wait at once."


class PromptBudget:
    """The prompt tokens of all requests in flight. It belongs to one event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_tokens = 0

    def take(self, scope: Mapping[str, Any], num_tokens: int, param: str) -> None:
        """Counts the prompts of the request of `scope` until `GivesBack` releases them. `param`: their field.

        Raises InvalidRequestError if they never fit, and OverloadedError if they do not fit now.
        """
        if num_tokens > self._limit:
            raise InvalidRequestError(
                f"{param} has {num_tokens} tokens in all, and this router accepts {self._limit} at once", param=param
            )
        if self._num_tokens + num_tokens > self._limit:
            raise OverloadedError(
                f"requests in flight have {self._num_tokens} prompt tokens already, of {self._limit}; retry later"
            )
        self._num_tokens += num_tokens
        scope["state"]["num_budgeted_tokens"] = num_tokens

    def give_back(self, scope: Mapping[str, Any]) -> None:
        """Gives back the tokens that the request of `scope` took, if any."""
        self._num_tokens -= scope["state"].pop("num_budgeted_tokens", 0)


class GivesBack:
    """Releases the requests' tokens, however they ended."""

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
    """Starts the choices of one request in order, while the waiting tokens at targets stay within a limit.

    One choice may always wait there, however long it is.
    """

    def __init__(self, limit: int = MAX_WAITING_TOKENS_AT_TARGETS) -> None:
        self.has_begun = False  # whether a choice has a token
        self._limit = limit
        self._num_tokens = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def place(self, num_tokens: int) -> AsyncIterator[StartPlace]:
        """Waits for a place for a choice of `num_tokens`; the choice may run on after it has left the place."""
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
            if not turn.cancelled():  # both may happen at the same moment
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
