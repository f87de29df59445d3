"""Live events for viewers of the page: tokens that each step added to a choice.

Events also have the accepted drafts of each step, but no text, token IDs or request IDs. Without viewers nothing is
recorded: a reply then only costs a check of `is_watched`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from pydantic_core import to_json

from cluster.errors import OverloadedError
from cluster.wire.replies import RoundCounts
from services.router.http.current_key import current_key

logger = logging.getLogger(__name__)

MAX_VIEWERS = 16
MAX_STEPS = 500  # steps in one event, over all choices
_INTERVAL_S = 0.1
_WORKERS_INTERVAL_S = 1.0
_MAX_BEHIND = 20  # maximum number of events that wait for one viewer


class Feed:
    """Distributes events to viewers. Belongs to one event loop."""

    def __init__(self, observe: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        """`observe`: returns the workers' state; called about once a second while the page is open."""
        self.is_watched = False
        self._observe = observe
        self._numbers = itertools.count(1)
        self._viewers: set[_Viewer] = set()
        self._steps: list[list[Any]] = []
        self._num_steps = 0
        self._left_out = [0, 0]  # numbers of steps and tokens that the next event leaves out
        self._running: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def new_choice(self) -> int:
        """Returns a number for a new choice."""
        return next(self._numbers)

    def note(self, choice: int, num_tokens: int, rounds: Sequence[RoundCounts], *, has_ended: bool) -> None:
        """Records a reply for `choice`. Must only be called while `is_watched`."""
        num_steps = 1 + 2 * len(rounds)  # the maximum: plain tokens may precede each round and follow the last
        if self._num_steps + num_steps > MAX_STEPS:
            self._left_out[0] += num_steps
            self._left_out[1] += num_tokens
            return
        self._num_steps += num_steps
        self._steps.append([choice, num_tokens, _flat(num_tokens, rounds), int(has_ended)])

    async def events(
        self, hello: Mapping[str, Any], is_let_in: Callable[[], bool] = lambda: True
    ) -> AsyncGenerator[bytes, None]:
        """Yields the server-sent events of one viewer; the first is `hello`.

        They end when `is_let_in` returns False. It is called before each event, thus at least about once a second, when
        the workers' state is sent. If there are `MAX_VIEWERS` already, they end for one of the key that has most of
        these; raises OverloadedError if this is not at least two more than the caller's key has.
        """
        if len(self._viewers) >= MAX_VIEWERS:
            self._end_one_for(current_key.get())
        with self._watching() as viewer:
            yield _event("hello", hello)
            is_last = self._is_closed
            while not is_last:
                events = await viewer.take()
                if viewer not in self._viewers or not is_let_in():
                    return
                is_last = self._is_closed
                yield events

    def _end_one_for(self, key: str | None) -> None:
        numbers = Counter(viewer.key for viewer in self._viewers)
        ((most, number),) = numbers.most_common(1)
        if number < numbers[key] + 2:
            raise OverloadedError(f"{MAX_VIEWERS} pages are connected already; close one, or retry later")
        viewer = next(viewer for viewer in self._viewers if viewer.key == most)
        self._viewers.remove(viewer)
        viewer.put(b"")

    def close(self) -> None:
        """Ends the events of all viewers: the router is about to stop."""
        self._is_closed = True
        for viewer in self._viewers:
            viewer.put(b": the router is stopping\n\n")

    @contextlib.contextmanager
    def _watching(self) -> Iterator[_Viewer]:
        viewer = _Viewer()
        self._viewers.add(viewer)
        if not self.is_watched:
            self.is_watched = True
            self._running = {asyncio.create_task(self._tell_steps()), asyncio.create_task(self._tell_workers())}
        try:
            yield viewer
        finally:
            self._viewers.discard(viewer)
            if not self._viewers:
                self.is_watched = False
                for task in self._running:
                    task.cancel()
                self._take_steps()

    async def _tell_steps(self) -> None:
        while True:
            await asyncio.sleep(_INTERVAL_S)
            if self._num_steps or self._left_out[0]:
                self._tell("steps", self._take_steps())

    async def _tell_workers(self) -> None:
        while True:
            asked_at = time.monotonic()
            try:
                self._tell("workers", await self._observe())
            except Exception:  # on any exception the page continues without workers
                logger.exception("the page's workers could not be polled")
            await asyncio.sleep(max(0.0, asked_at + _WORKERS_INTERVAL_S - time.monotonic()))

    def _take_steps(self) -> dict[str, Any]:
        steps, self._steps, self._num_steps = self._steps, [], 0
        left_out, self._left_out = self._left_out, [0, 0]
        return {"choices": steps, "left_out": left_out}

    def _tell(self, name: str, value: Mapping[str, Any]) -> None:
        event = _event(name, value)  # encoded once for all viewers
        for viewer in self._viewers:
            viewer.put(event)


class _Viewer:
    """Queue of events for one viewer; a full queue drops the oldest."""

    def __init__(self) -> None:
        self.key = current_key.get()
        self._waiting: deque[bytes] = deque(maxlen=_MAX_BEHIND)
        self._has_some = asyncio.Event()

    def put(self, event: bytes) -> None:
        self._waiting.append(event)
        self._has_some.set()

    async def take(self) -> bytes:
        """Waits for events and returns all of them."""
        await self._has_some.wait()
        self._has_some.clear()
        events = b"".join(self._waiting)
        self._waiting.clear()
        return events


def _flat(num_tokens: int, rounds: Sequence[RoundCounts]) -> list[int]:
    """Returns a flat list of two numbers for each step, in order: drafted and accepted tokens.

    n plain decodes in a row are merged into one pair: 0 and n.
    """
    flat: list[int] = []
    end = 0
    for counts in rounds:
        if counts.start > end:
            flat += (0, counts.start - end)
        flat += (counts.num_draft_tokens, counts.num_accepted_tokens)
        end = counts.start + counts.num_accepted_tokens + 1
    if num_tokens > end:
        flat += (0, num_tokens - end)
    return flat


def _event(name: str, value: Mapping[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + to_json(value) + b"\n\n"
