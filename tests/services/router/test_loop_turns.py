"""Requests of API keys begin one in each turn of the event loop, and keys follow each other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.types import Receive, Scope, Send

from services.router.http.current_key import current_key
from services.router.http.loop_turns import BeginsInTurn, LoopTurns


class Begun:
    """Application that notes the key of each request, and the turn of the loop in which it begins."""

    def __init__(self) -> None:
        self.requests: list[tuple[str | None, int]] = []
        self.turn = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.requests.append((current_key.get(), self.turn))

    async def count_turns(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)


def begin(keys: Sequence[str | None], cancelled: Sequence[int] = ()) -> list[tuple[str | None, int]]:
    """Sends a request of each of `keys` at once. Returns the keys in the order in which they began, with the turns.

    `cancelled`: indices of requests that end while they wait.
    """

    async def run() -> list[tuple[str | None, int]]:
        app = Begun()
        middleware = BeginsInTurn(app, turns=LoopTurns())

        async def ask(key: str | None) -> None:
            current_key.set(key)
            await middleware({"type": "http"}, _never, _drop)

        counting = asyncio.create_task(app.count_turns())
        asking = [asyncio.create_task(ask(key)) for key in keys]
        await asyncio.sleep(0)
        for index in cancelled:
            asking[index].cancel()
        await asyncio.wait_for(asyncio.gather(*asking, return_exceptions=True), 10)
        counting.cancel()
        return app.requests

    return asyncio.run(run())


async def _never() -> dict[str, str]:
    raise AssertionError("no message is received")


async def _drop(_: object) -> None:
    raise AssertionError("no message is sent")


def test_keys_follow_each_other_and_one_request_begins_in_a_turn() -> None:
    begun = begin(["a", "a", "a", "a", "b", "c"])
    assert [key for key, _ in begun] == ["a", "a", "b", "c", "a", "a"]
    assert len({turn for _, turn in begun}) == len(begun)


def test_requests_that_end_while_they_wait_take_no_turn() -> None:
    begun = begin(["a", "a", "b", "b"], cancelled=[1, 2])
    assert [key for key, _ in begun] == ["a", "b"]


def test_without_keys_requests_begin_at_once() -> None:
    begun = begin([None] * 4)
    assert len({turn for _, turn in begun}) == 1


def test_a_request_that_comes_alone_begins_at_once() -> None:
    ((_, turn),) = begin(["a"])
    assert turn == 1
