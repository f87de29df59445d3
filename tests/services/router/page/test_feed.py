"""Tests that viewers get an event for every step and no others, and that nothing is kept without viewers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from cluster.errors import OverloadedError
from cluster.wire.replies import RoundCounts
from services.router.http.current_key import current_key
from services.router.page import feed as module
from services.router.page.feed import MAX_STEPS, MAX_VIEWERS, Feed
from tests.waiting import WAIT_S

HELLO = {"model": "m"}


async def observed() -> dict[str, Any]:
    return {"targets": []}


async def next_of(viewer: AsyncGenerator[bytes, None], name: str) -> Any:
    """The next event of that name."""
    while True:
        for event in (await anext(viewer)).decode().split("\n\n"):
            if event.startswith(f"event: {name}\n"):
                return json.loads(event.partition("data: ")[2])


def run(test) -> None:
    asyncio.run(asyncio.wait_for(test, timeout=WAIT_S))


def test_viewers_are_told_of_steps_and_workers() -> None:
    async def body() -> None:
        feed = Feed(observed)
        choice, other = feed.new_choice(), feed.new_choice()
        assert not feed.is_watched
        viewers = [feed.events(HELLO), feed.events(HELLO)]
        for viewer in viewers:
            assert await next_of(viewer, "hello") == HELLO
        assert feed.is_watched
        feed.note(choice, 4, [RoundCounts(4, 3)], has_ended=False)
        feed.note(other, 6, [RoundCounts(4, 1, 1), RoundCounts(2, 0, 4)], has_ended=True)
        expected = [[choice, 4, [4, 3], 0], [other, 6, [0, 1, 4, 1, 0, 1, 2, 0, 0, 1], 1]]
        for viewer in viewers:
            assert await next_of(viewer, "steps") == {"choices": expected, "left_out": [0, 0]}
            assert await next_of(viewer, "workers") == {"targets": []}
            await viewer.aclose()
        assert not feed.is_watched
        assert not feed._steps

    run(body())


def test_an_event_is_bounded_and_says_what_it_leaves_out() -> None:
    async def body() -> None:
        feed = Feed(observed)
        viewer = feed.events(HELLO)
        await anext(viewer)
        for _ in range(MAX_STEPS):
            feed.note(1, 5, [RoundCounts(4, 4)], has_ended=False)
        told = await next_of(viewer, "steps")
        assert 3 * len(told["choices"]) <= MAX_STEPS
        assert told["left_out"][1] == 5 * (MAX_STEPS - len(told["choices"]))
        feed.note(1, 1, [], has_ended=True)
        assert await next_of(viewer, "steps") == {"choices": [[1, 1, [0, 1], 1]], "left_out": [0, 0]}
        await viewer.aclose()

    run(body())


def test_a_viewer_that_reads_nothing_holds_a_bounded_number_of_events(monkeypatch) -> None:
    monkeypatch.setattr(module, "_INTERVAL_S", 0.001)

    async def body() -> None:
        feed = Feed(observed)
        slow, quick = feed.events(HELLO), feed.events(HELLO)
        for viewer in (slow, quick):
            await anext(viewer)
        for number in range(60):
            feed.note(1, number, [], has_ended=False)
            assert (await next_of(quick, "steps"))["choices"][0][1] == number
        told = (await anext(slow)).count(b"event: ")
        assert 0 < told <= module._MAX_BEHIND
        for viewer in (slow, quick):
            await viewer.aclose()

    run(body())


def test_viewers_are_bounded() -> None:
    async def body() -> None:
        feed = Feed(observed)
        viewers = [feed.events(HELLO) for _ in range(MAX_VIEWERS)]
        for viewer in viewers:
            await anext(viewer)
        with pytest.raises(OverloadedError, match="16 pages"):
            await anext(feed.events(HELLO))
        await viewers.pop().aclose()
        viewers.append(feed.events(HELLO))
        await anext(viewers[-1])
        for viewer in viewers:
            await viewer.aclose()

    run(body())


def test_a_key_cannot_take_every_place() -> None:
    async def body() -> None:
        feed = Feed(observed)
        current_key.set("greedy")
        greedy = [feed.events(HELLO) for _ in range(MAX_VIEWERS)]
        for viewer in greedy:
            await anext(viewer)
        current_key.set("other")
        other = feed.events(HELLO)
        assert b"hello" in await anext(other)
        events = await asyncio.gather(*(anext(viewer, None) for viewer in greedy))
        assert events.count(None) == 1
        current_key.set("greedy")
        with pytest.raises(OverloadedError, match="16 pages"):
            await anext(feed.events(HELLO))
        feed.close()
        for viewer in (*greedy, other):
            await viewer.aclose()

    run(body())


def test_workers_that_cannot_be_asked_do_not_end_the_feed() -> None:
    async def broken() -> dict[str, Any]:
        raise ZeroDivisionError

    async def body() -> None:
        feed = Feed(broken)
        viewer = feed.events(HELLO)
        await anext(viewer)
        await asyncio.sleep(0)
        feed.note(1, 1, [], has_ended=False)
        assert (await next_of(viewer, "steps"))["choices"]
        feed.close()
        assert [event async for event in viewer][-1].startswith(b": the router is stopping")

    run(body())
