"""The draft workers that one coordinator may use."""

from __future__ import annotations

import asyncio
import os
import queue
from collections.abc import AsyncIterator, Iterator, Sequence

from cluster.config import Config
from cluster.config.ray import TRIAL_SHARE
from cluster.coordination.base import LinkEvent, LinkPool, take_all
from cluster.coordination.link import DraftLink
from cluster.placement.place import SOMEWHERE, Endpoint, Place
from cluster.telemetry.metrics import Reading
from cluster.transport.dialing import PLAIN, Dialer


class DraftPool(LinkPool):
    """Links to draft workers. An event loop runs them; an engine's thread uses them.

    Each item of the `endpoints` of `run` is a complete list of workers, which replaces the previous list.
    `Endpoint.parse` defines the format of its lines. The pool keeps the links' events until the engine's thread takes
    them with `poll`.

    `place`: place of the target. `trial_share`: share of its sequences that try draft models that are not the best.
    `dialer`: makes the links' channels.
    """

    def __init__(
        self,
        tokenizer_fingerprint: str,
        place: Place = SOMEWHERE,
        trial_share: float = TRIAL_SHARE,
        dialer: Dialer = PLAIN,
    ) -> None:
        self.trial_share = trial_share
        self._dialer = dialer
        self._place = place
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._links: dict[str, DraftLink] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # Not a Condition, which takes its lock in Python: a thread that it wakes sleeps again soon, because the links'
        # thread has not released the lock yet.
        self._events: queue.SimpleQueue[LinkEvent] = queue.SimpleQueue()

    @classmethod
    def of(cls, config: Config, tokenizer_fingerprint: str) -> DraftPool:
        """Returns the pool of a target with the settings `config`."""
        place, dialer = config.placement, Dialer.of(config.tls, "target", config.draft.tls_server_name)
        return cls(tokenizer_fingerprint, Place.own(place, os.environ), place.trial_share, dialer)

    @property
    def num_endpoints(self) -> int:
        """Number of draft workers that are listed now."""
        return len(self._links)

    @property
    def num_links_up(self) -> int:
        return sum(link.is_up for link in tuple(self._links.values()))

    async def run(self, endpoints: AsyncIterator[Sequence[str]]) -> None:
        """Keeps a link to every endpoint until cancelled."""
        try:
            async for lines in endpoints:
                self._follow(lines)
            await asyncio.Event().wait()  # the last list stays valid when `endpoints` ends
        finally:
            self._follow(())

    def _follow(self, lines: Sequence[str]) -> None:
        places = {endpoint.address: endpoint.place for endpoint in map(Endpoint.parse, lines)}
        addresses = places.keys()
        for address in self._links.keys() - addresses:
            self._tasks.pop(address).cancel()
            del self._links[address]
        for address in addresses - self._links.keys():
            expected = self._place.round_trip_to(places[address])
            link = DraftLink(address, self._tokenizer_fingerprint, self._events.put, expected, self._dialer)
            self._links[address] = link
            self._tasks[address] = asyncio.create_task(link.run())

    def poll(self, timeout: float = 0.0) -> list[LinkEvent]:
        """Returns the events since the last call, waiting up to `timeout` seconds for the first."""
        events = take_all(self._events, timeout)
        for happened in events:
            assert isinstance(happened.link, DraftLink)
            happened.link.num_taken_bytes += happened.num_bytes
        return events

    def readings(self) -> Iterator[Reading]:
        """Returns the metrics of the pool and of its links. Thread-safe."""
        yield from super().readings()
        for link in tuple(self._links.values()):
            yield from link.readings()
