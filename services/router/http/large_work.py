"""Runs work in a thread if it is large enough to delay every stream on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from services.router.http.current_key import current_key
from services.router.http.fair_thread import FairThread

T = TypeVar("T")

LARGE_BYTES = 2048  # size of a body: tokenizing it takes up to 1.5 ms, everything else less than 1 ms
_SLOW_BYTES = 16_384  # tokenizing fewer takes up to 10 ms
_VERY_SLOW_BYTES = 2**20  # tokenizing fewer takes up to 0.5 s
# The last one may spell others.
_SLOW_FIELDS = (b"bad_words", b"schema", b'"tools"', b"guided_", b"structured_outputs", rb"\u00")

# One thread for each size, the largest first: work waits only for work of about its own length. More of them would take
# more turns from the event loop.
_THREADS = {number: FairThread() for number in (_VERY_SLOW_BYTES, _SLOW_BYTES, -1)}


def cost_of(body: bytes) -> int:
    """Returns the size of `body`, or more if it may have schemas or bad words: these take long."""
    if len(body) > _SLOW_BYTES or not any(word in body for word in _SLOW_FIELDS):  # searching a large one takes 20 ms
        return len(body)
    return _SLOW_BYTES + 1


async def run_in_thread_if_large(num_bytes: int, work: Callable[[], T]) -> T:
    """Returns the result of `work`; runs it in a thread if `num_bytes` is over LARGE_BYTES."""
    return work() if num_bytes <= LARGE_BYTES else await run_in_thread(num_bytes, work)


async def run_in_thread(num_bytes: int, work: Callable[[], T]) -> T:
    """Returns the result of `work` on `num_bytes`, which runs in a thread when it is the turn of the request's key."""
    thread = next(thread for bound, thread in _THREADS.items() if num_bytes > bound)
    return await asyncio.wrap_future(thread.submit(current_key.get(), work))
