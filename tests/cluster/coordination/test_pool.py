"""A pool follows lists of addresses, and hands what happens on its links to a thread that may be busy."""

from __future__ import annotations

import asyncio
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence

import grpc
import pytest

from cluster.coordination.base import LinkEvent, LinkState
from cluster.coordination.link import DraftLink
from cluster.coordination.pool import DraftPool
from cluster.wire.codec import encode_reply
from cluster.wire.messages import Proposal, SpeculateReply, SpeculateRequest
from protos.speculation.v1 import draft_pb2
from tests.background_loop import BackgroundLoop
from tests.endpoints import Endpoints
from tests.waiting import WAIT_S, turns, wait_until

from .draft_server import FINGERPRINT, DraftServer
from .test_link import opens


class Followed:
    """A pool that runs, and the lists that it follows."""

    def __init__(self, loop: BackgroundLoop) -> None:
        self.pool = DraftPool(FINGERPRINT)
        self.endpoints = Endpoints(loop)
        self.running = loop.start(self.pool.run(self.endpoints.lists()))
        self._loop = loop

    def events(self, number: int) -> list[LinkEvent]:
        """Waits for `number` events and returns them."""
        events: list[LinkEvent] = []
        deadline = time.monotonic() + WAIT_S
        while len(events) < number:
            assert time.monotonic() < deadline, f"timed out after {events}"
            events += self.pool.poll(timeout=1.0)
        assert len(events) == number
        return events

    def states(self, number: int) -> set[tuple[str, LinkState | SpeculateReply]]:
        """The next `number` events, by address."""
        return {(event.link.address, event.event) for event in self.events(number)}

    def settle(self) -> None:
        """The loop has done all that it can without the network."""
        self._loop.run(turns())


@pytest.fixture
def servers(loop: BackgroundLoop) -> Iterator[list[DraftServer]]:
    servers = [DraftServer(loop) for _ in range(2)]
    yield servers
    for server in servers:
        server.stop()


@pytest.fixture
def addresses(servers: Sequence[DraftServer]) -> list[str]:
    return [server.address for server in servers]


@pytest.fixture
def followed(loop: BackgroundLoop) -> Iterator[Followed]:
    followed = Followed(loop)
    yield followed
    followed.running.cancel()
    wait_until(lambda: followed.pool.num_links_up == 0)


class TestLists:
    def test_every_address_gets_a_link(self, followed: Followed, addresses: list[str]) -> None:
        followed.endpoints.become(*addresses)
        assert followed.states(2) == {(address, LinkState.UP) for address in addresses}
        assert followed.pool.num_links_up == 2

    def test_an_address_that_is_added_leaves_the_others_alone(
        self, followed: Followed, servers: list[DraftServer], addresses: list[str]
    ) -> None:
        first, second = addresses
        followed.endpoints.become(first)
        assert followed.states(1) == {(first, LinkState.UP)}
        followed.endpoints.become(first, second)
        assert followed.states(1) == {(second, LinkState.UP)}
        wait_until(lambda: [server.num_streams_ever for server in servers] == [1, 1])

    def test_an_address_that_is_missing_loses_its_link(
        self, followed: Followed, servers: list[DraftServer], addresses: list[str]
    ) -> None:
        first, second = addresses
        followed.endpoints.become(first, second)
        followed.events(2)
        wait_until(lambda: [server.num_streams for server in servers] == [1, 1])
        followed.endpoints.become(second)
        assert followed.states(1) == {(first, LinkState.DOWN)}
        wait_until(lambda: [server.num_streams for server in servers] == [0, 1])
        assert followed.pool.num_links_up == 1
        followed.endpoints.become(second, first)  # and gets another when it is there again
        assert followed.states(1) == {(first, LinkState.UP)}
        wait_until(lambda: [server.num_streams_ever for server in servers] == [2, 1])

    def test_an_address_that_stands_twice_gets_one_link(
        self, followed: Followed, servers: list[DraftServer], addresses: list[str]
    ) -> None:
        followed.endpoints.become(addresses[0], addresses[1], addresses[0])
        followed.events(2)
        wait_until(lambda: [server.num_streams for server in servers] == [1, 1])
        followed.settle()
        assert followed.pool.poll() == []

    def test_a_list_that_ends_stays(self, followed: Followed, servers: list[DraftServer], addresses: list[str]) -> None:
        followed.endpoints.become(addresses[0])
        (event,) = followed.events(1)
        followed.endpoints.end()
        followed.settle()
        assert not followed.running.done()
        event.link.send(SpeculateRequest(closes={7}))
        assert servers[0].request() == SpeculateRequest(closes={7})
        assert followed.pool.num_links_up == 1

    def test_a_pool_that_is_cancelled_ends_all_links(
        self, followed: Followed, servers: list[DraftServer], addresses: list[str]
    ) -> None:
        followed.endpoints.become(*addresses)
        followed.events(2)
        wait_until(lambda: [server.num_streams for server in servers] == [1, 1])
        followed.running.cancel()
        assert followed.states(2) == {(address, LinkState.DOWN) for address in addresses}
        wait_until(lambda: [server.num_streams for server in servers] == [0, 0])


class TestPoll:
    def test_without_a_timeout_it_does_not_wait(self, followed: Followed) -> None:
        assert followed.pool.poll() == []

    def test_it_waits_for_its_timeout_when_nothing_happens(self, followed: Followed) -> None:
        before = time.monotonic()
        assert followed.pool.poll(timeout=0.1) == []
        assert time.monotonic() - before >= 0.099

    def test_it_returns_as_soon_as_something_happens(self, followed: Followed, addresses: list[str]) -> None:
        polled: list[list[LinkEvent]] = []
        timeout = 2 * WAIT_S
        polling = threading.Thread(target=lambda: polled.append(followed.pool.poll(timeout)), daemon=True)
        polling.start()
        followed.endpoints.become(addresses[0])
        polling.join(WAIT_S)
        assert not polling.is_alive()
        ((event,),) = polled
        assert (event.link.address, event.event) == (addresses[0], LinkState.UP)

    @pytest.mark.parametrize("timeout", [0.0, WAIT_S])
    def test_it_returns_all_that_happened_in_its_order(
        self, timeout: float, followed: Followed, servers: list[DraftServer], addresses: list[str]
    ) -> None:
        followed.endpoints.become(addresses[0])
        (event,) = followed.events(1)
        event.link.send(opens(*range(20)))
        servers[0].request()
        replies = [SpeculateReply(refused={number}) for number in range(20)]
        num_bytes = sum(servers[0].reply(reply).ByteSize() for reply in replies)
        wait_until(lambda: event.link.traffic.received == num_bytes)
        followed.settle()
        assert [event.event for event in followed.pool.poll(timeout)] == replies
        assert followed.pool.poll() == []


class Flood:
    """A worker that sends `message` without end, on each stream that the link opens."""

    def __init__(self, loop: BackgroundLoop, server: DraftServer, message: draft_pb2.SpeculateReply) -> None:
        self.num_sent = 0
        self._server, self._message = server, message
        self._running = loop.start(self._send())

    async def _send(self) -> None:
        while True:
            try:
                await self._server.stream.write(self._message)
                self.num_sent += 1
            except (grpc.aio.BaseError, asyncio.InvalidStateError):  # the stream has ended
                await asyncio.sleep(0.01)

    def stop(self) -> None:
        self._running.cancel()


class TestFloods:
    """A worker sends what nobody asked for, or much more than the engine's thread takes, which may be idle."""

    MAX_WAITING_BYTES = 2**20

    @pytest.fixture
    def link(self, followed: Followed, servers: list[DraftServer], addresses: list[str]) -> DraftLink:
        followed.endpoints.become(addresses[0])
        (event,) = followed.events(1)
        wait_until(lambda: servers[0].num_streams > 0)
        assert isinstance(event.link, DraftLink)
        return event.link

    @pytest.mark.parametrize("num_open", [0, 8])
    @pytest.mark.parametrize("num_tokens", [0, 1, 600])
    def test_unread_replies_are_bounded(
        self,
        num_open: int,
        num_tokens: int,
        loop: BackgroundLoop,
        followed: Followed,
        servers: list[DraftServer],
        link: DraftLink,
    ) -> None:
        if num_open:
            link.send(opens(*range(1, num_open + 1)))
            servers[0].request()
        proposals = {number: Proposal(number, 3, [100_000] * num_tokens) for number in range(1, 11) if num_tokens}
        message = encode_reply(SpeculateReply(proposals, credit=5))
        tracemalloc.start()
        flood = Flood(loop, servers[0], message)
        settled_bytes = settled(lambda: link.traffic.received)
        num_kept_bytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert settled_bytes <= self.MAX_WAITING_BYTES + message.ByteSize()
        assert num_kept_bytes < 32 * self.MAX_WAITING_BYTES  # Python's numbers are larger than those on the wire
        taken = followed.pool.poll()
        assert len(taken) <= self.MAX_WAITING_BYTES / 1024 + 1
        for happened in taken:
            assert isinstance(happened.event, SpeculateReply)
            assert happened.event.proposals.keys() <= set(range(1, num_open + 1))
        wait_until(lambda: link.traffic.received > 2 * settled_bytes or not followed.pool.poll(0.1))
        assert link.traffic.received > settled_bytes  # the stream goes on when the engine's thread has taken some
        flood.stop()

    def test_new_streams_do_not_add_to_them(
        self, loop: BackgroundLoop, followed: Followed, servers: list[DraftServer], link: DraftLink
    ) -> None:
        message = encode_reply(SpeculateReply({1: Proposal(1, 3, [7] * 50_000)}))
        flood = Flood(loop, servers[0], message)
        settled(lambda: link.traffic.received)
        assert flood.num_sent * message.ByteSize() < 2 * self.MAX_WAITING_BYTES  # gRPC buffers little more
        servers[0].stop()
        servers[0].start()
        assert settled(lambda: link.traffic.received) <= self.MAX_WAITING_BYTES + message.ByteSize()
        states = []
        while len(states) < 2:  # the end is noticed when the replies have been taken
            states += [h.event for h in followed.pool.poll(WAIT_S) if isinstance(h.event, LinkState)]
        assert states == [LinkState.DOWN, LinkState.UP]
        flood.stop()

    def test_the_next_round_is_carried(
        self, loop: BackgroundLoop, followed: Followed, servers: list[DraftServer], link: DraftLink
    ) -> None:
        flood = Flood(loop, servers[0], encode_reply(SpeculateReply({9: Proposal(9, 3, [7])})))
        settled(lambda: link.traffic.received)
        flood.stop()
        link.send(opens(1))
        servers[0].request()
        servers[0].reply(SpeculateReply({1: Proposal(1, 3, [7, 8])}))
        taken: list[LinkEvent] = []

        def has_come() -> bool:
            taken.extend(followed.pool.poll())
            return taken[-1].event == SpeculateReply({1: Proposal(1, 3, [7, 8])})

        wait_until(has_come)


def settled(read: Callable[[], int]) -> int:
    """Waits until `read` returns the same number above 0 for half a second, and returns it."""
    last, since = 0, time.monotonic()
    while last == 0 or time.monotonic() < since + 0.5:
        if (value := read()) != last:
            last, since = value, time.monotonic()
        assert last < 2**24, "it does not settle"
        time.sleep(0.01)
    return last


def test_readings_are_of_every_link(followed: Followed, servers: list[DraftServer], addresses: list[str]) -> None:
    def links_up() -> list[float]:
        return [r.value for r in followed.pool.readings() if r.name == "outrider_draft_links_up"]

    def read() -> set[str]:
        return {r.labels["draft"] for r in followed.pool.readings() if "draft" in r.labels}

    assert (links_up(), read()) == ([0], set())
    followed.endpoints.become(*addresses)
    followed.events(2)
    assert (links_up(), read()) == ([2], set(addresses))
    servers[0].stop()
    assert followed.states(1) == {(addresses[0], LinkState.DOWN)}
    assert (links_up(), read()) == ([1], set(addresses))  # it may come back
    followed.endpoints.become(addresses[1])
    followed.settle()
    assert (links_up(), read()) == ([1], {addresses[1]})
