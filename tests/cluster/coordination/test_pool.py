"""A pool follows lists of addresses, and hands what happens on its links to a thread that may be busy."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from cluster.coordination.base import LinkEvent, LinkState
from cluster.coordination.pool import DraftPool
from cluster.wire.messages import SpeculateReply, SpeculateRequest
from tests.background_loop import BackgroundLoop
from tests.endpoints import Endpoints
from tests.waiting import WAIT_S, turns, wait_until

from .draft_server import FINGERPRINT, DraftServer


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
        replies = [SpeculateReply(refused={number}) for number in range(20)]
        num_bytes = sum(servers[0].reply(reply).ByteSize() for reply in replies)
        wait_until(lambda: event.link.traffic.received == num_bytes)
        followed.settle()
        assert [event.event for event in followed.pool.poll(timeout)] == replies
        assert followed.pool.poll() == []


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
