"""Shares the event loop among API keys: one request begins at a time."""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

from services.router.http.current_key import current_key


class LoopTurns:
    """Lets one request begin per turn of the event loop; keys with requests that wait follow each other.

    Until a request first waits for something, it may compute for a millisecond or more. Requests that begin in the same
    turn would add up, and every token of another key's stream would wait for all of them.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by key, the next one first; none is empty
        self._is_taken = False  # whether a request begins in this turn of the loop

    async def take(self, name: str) -> None:
        """Waits for a turn of the key `name`."""
        loop = asyncio.get_running_loop()
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._let_next_begin, loop)
            return
        turn = loop.create_future()
        self._waiting.setdefault(name, deque()).append(turn)
        await turn

    def _let_next_begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_taken = False
        while self._waiting and not self._is_taken:
            name = next(iter(self._waiting))
            turns = self._waiting.pop(name)
            turn = turns.popleft()
            if turns:
                self._waiting[name] = turns
            if not turn.done():  # its request may have been cancelled
                turn.set_result(None)
                self._is_taken = True
                loop.call_soon(self._let_next_begin, loop)  # after the request, which begins in the loop's next turn


class BeginsInTurn:
    """Middleware that begins the requests of keys in turn.

    Must be inside the middleware that reads bodies: a request that waits for its body would waste its turn.
    """

    def __init__(self, app: ASGIApp, *, turns: LoopTurns) -> None:
        self._app = app
        self._turns = turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = current_key.get()
        if scope["type"] == "http" and name is not None:
            await self._turns.take(name)
        await self._app(scope, receive, send)
