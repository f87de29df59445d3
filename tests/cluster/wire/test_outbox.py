"""Messages go from any thread to an event loop that may be late in taking them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator

from cluster.wire.messages import Proposal, SpeculateReply
from cluster.wire.outbox import Outbox
from tests.waiting import WAIT_S, turns


@contextlib.asynccontextmanager
async def taking(outbox: Outbox[SpeculateReply]) -> AsyncIterator[asyncio.Task[SpeculateReply]]:
    """A task that takes, and waits already."""
    task = asyncio.create_task(outbox.take())
    await turns()
    yield task
    task.cancel()


def test_messages_that_wait_become_one() -> None:
    async def run() -> None:
        outbox: Outbox[SpeculateReply] = Outbox()
        outbox.put(SpeculateReply(lost={1}))
        outbox.put(SpeculateReply(lost={2}))
        assert await outbox.take() == SpeculateReply(lost={1, 2})
        outbox.put(SpeculateReply(lost={3}))
        assert await outbox.take() == SpeculateReply(lost={3})

    asyncio.run(run())


def test_nothing_put_by_another_thread_is_lost_or_given_twice() -> None:
    num_messages = 3000

    async def run() -> list[int]:
        outbox: Outbox[SpeculateReply] = Outbox()
        thread = threading.Thread(target=lambda: [outbox.put(SpeculateReply(lost={i})) for i in range(num_messages)])
        thread.start()
        taken: list[int] = []
        while len(taken) < num_messages:
            taken.extend(sorted((await outbox.take()).lost))
        thread.join()
        return taken

    assert asyncio.run(asyncio.wait_for(run(), timeout=WAIT_S)) == list(range(num_messages))


def test_nothing_stays_open_of_one_that_was_closed() -> None:
    async def run() -> None:
        for _ in range(20):
            outbox: Outbox[SpeculateReply] = Outbox()
            outbox.put(SpeculateReply(lost={1}))
            await outbox.take()
            outbox.close()
            outbox.put(SpeculateReply(lost={2}))  # by a thread that does not know yet
            closed.append(outbox)  # in a cycle of others, which is found late

    closed: list[Outbox[SpeculateReply]] = []
    asyncio.run(run())  # what the first loop of a process opens stays
    before = len(os.listdir("/dev/fd"))
    asyncio.run(run())
    assert len(os.listdir("/dev/fd")) <= before


def test_one_message_a_sequence_waits_however_many_were_put() -> None:
    async def run() -> None:
        outbox: Outbox[SpeculateReply] = Outbox()
        for base in range(1000):
            outbox.put(SpeculateReply(proposals={1: Proposal(1, base, [base])}, lost={base}))
        outbox.put(SpeculateReply(proposals={2: Proposal(2, 7, [8])}))
        taken = await outbox.take()
        assert taken.proposals == {1: Proposal(1, 999, [999]), 2: Proposal(2, 7, [8])}
        assert taken.lost == set(range(1000))
        async with taking(outbox) as task:
            assert not task.done()  # nothing is left

    asyncio.run(run())


def test_a_put_by_another_thread_wakes_the_one_who_waits() -> None:
    async def run() -> None:
        outbox: Outbox[SpeculateReply] = Outbox()
        for number in range(3):
            async with taking(outbox) as task:
                assert not task.done()
                threading.Thread(target=outbox.put, args=(SpeculateReply(lost={number}),)).start()
                assert await asyncio.wait_for(task, WAIT_S) == SpeculateReply(lost={number})

    asyncio.run(run())


def test_a_put_does_not_block_while_nobody_takes() -> None:
    """More are put than a pipe has room for, and the loop does not turn meanwhile."""
    num_messages = 200_000
    message = SpeculateReply(lost={1})

    async def run() -> None:
        outbox: Outbox[SpeculateReply] = Outbox()
        thread = threading.Thread(target=lambda: [outbox.put(message) for _ in range(num_messages)], daemon=True)
        thread.start()
        thread.join(timeout=WAIT_S)
        assert not thread.is_alive()
        assert await outbox.take() == message

    asyncio.run(run())


def test_one_who_gives_up_waiting_takes_nothing_away() -> None:
    async def run() -> None:
        outbox: Outbox[SpeculateReply] = Outbox()
        async with taking(outbox) as task:
            assert not task.done()
        outbox.put(SpeculateReply(lost={1}))
        assert await asyncio.wait_for(outbox.take(), WAIT_S) == SpeculateReply(lost={1})

    asyncio.run(run())


def test_what_is_put_after_the_close_is_lost() -> None:
    async def run() -> None:
        outbox: Outbox[SpeculateReply] = Outbox()
        async with taking(outbox) as task:
            outbox.close()
            outbox.put(SpeculateReply(lost={1}))
            outbox.put(SpeculateReply(lost={2}))
            await turns()
            assert not task.done()

    asyncio.run(run())
