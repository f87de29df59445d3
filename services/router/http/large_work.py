"""What takes long enough to hold up every stream is done beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

LARGE_BYTES = 16_384  # of a body: to tokenise so many takes 3 to 10 ms, all else of it less than one

# Two: each that computes in Python takes its turns of 5 ms from the event loop.
_threads = ThreadPoolExecutor(2, thread_name_prefix="large-work")


async def run_in_thread_if_large(num_bytes: int, work: Callable[[], T]) -> T:
    """The result of `work` on so many bytes: in a thread where they are many."""
    return work() if num_bytes <= LARGE_BYTES else await run_in_thread(work)


async def run_in_thread(work: Callable[[], T]) -> T:
    """Returns the result of `work`, which is done in a thread."""
    return await asyncio.get_running_loop().run_in_executor(_threads, work)
