from __future__ import annotations

import asyncio
import time

import pytest

from services.launch.delay_proxy import RETRANSMISSION_SECONDS, DelayProxy
from tests.waiting import WAIT_S


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(1000):
        writer.write(chunk)
    writer.close()


async def round_trips(count: int, *, round_trip_seconds: float, loss: float = 0.0) -> list[float]:
    """Seconds of each, one after another, through a proxy to an echo."""
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    proxy = DelayProxy("127.0.0.1", server.sockets[0].getsockname()[1], round_trip_seconds, loss)
    reader, writer = await asyncio.open_connection("127.0.0.1", await proxy.start())
    seconds = []
    for number in range(count):
        started_at = time.perf_counter()
        writer.write(bytes([number]))
        assert await reader.read(1) == bytes([number])
        seconds.append(time.perf_counter() - started_at)
    writer.close()
    await proxy.stop()
    server.close()
    return seconds


def test_a_round_trip_takes_as_long_as_configured():
    seconds = asyncio.run(round_trips(5, round_trip_seconds=0.4))
    assert 0.4 <= min(seconds) < 0.8


def test_nothing_is_added_without_a_delay():
    assert min(asyncio.run(round_trips(20, round_trip_seconds=0.0))) < 0.1


def test_a_lost_chunk_comes_a_retransmission_later():
    seconds = asyncio.run(round_trips(3, round_trip_seconds=0.01, loss=1.0))
    assert min(seconds) >= 2 * RETRANSMISSION_SECONDS + 0.01


def test_chunks_keep_their_order_when_one_is_lost():
    async def scenario() -> bytes:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        proxy = DelayProxy("127.0.0.1", server.sockets[0].getsockname()[1], 0.004, loss=0.2, seed=1)
        reader, writer = await asyncio.open_connection("127.0.0.1", await proxy.start())
        for number in range(30):
            writer.write(bytes([number]))
            await asyncio.sleep(0.005)
        writer.write_eof()
        received = await reader.read()
        assert proxy.num_losses > 0
        await proxy.stop()
        server.close()
        return received

    assert asyncio.run(scenario()) == bytes(range(30))


@pytest.mark.parametrize("is_far_end", [True, False])
def test_when_one_end_goes_the_other_is_told(is_far_end):
    async def scenario() -> None:
        connected: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await connected.put((reader, writer))

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        proxy = DelayProxy("127.0.0.1", server.sockets[0].getsockname()[1], 0.004)
        near = await asyncio.open_connection("127.0.0.1", await proxy.start())
        far = await connected.get()
        leaving, staying = (far, near) if is_far_end else (near, far)
        leaving[1].close()
        assert await asyncio.wait_for(staying[0].read(), timeout=WAIT_S) == b""
        staying[1].close()
        await proxy.stop()
        server.close()

    asyncio.run(scenario())
