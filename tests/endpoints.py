"""The addresses of draft workers, as a target follows them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from tests.background_loop import BackgroundLoop


class Endpoints:
    """Lists of addresses that the test gives, one after the other; each stands for the one before."""

    def __init__(self, loop: BackgroundLoop) -> None:
        self._loop = loop
        self._lists: asyncio.Queue[Sequence[str] | None] = asyncio.Queue()

    def become(self, *addresses: str) -> None:
        """The draft workers are at `addresses` from now on."""
        self._loop.run(self._lists.put(addresses))

    def end(self) -> None:
        """No list comes any more."""
        self._loop.run(self._lists.put(None))

    async def lists(self) -> AsyncIterator[Sequence[str]]:
        while (addresses := await self._lists.get()) is not None:
            yield addresses
