"""A TCP proxy that adds a round trip and losses to a connection, for simulations on one machine.

    python -m services.launch.delay_proxy --listen 127.0.0.1:7001 --to 127.0.0.1:7000 --round-trip-ms 10 --loss 0.01

Every chunk is sent half the round trip later, in order. TCP never loses data but sends it again: a chunk is "lost" with
the set probability, which delays it and all later ones in its direction by 200 ms more, the shortest retransmission
timeout of Linux. Chunks are the results of single reads, so that a message is usually one chunk.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

RETRANSMISSION_SECONDS = 0.2

_CHUNK_BYTES = 64 * 2**10
_MAX_CHUNKS = 4096  # in flight in one direction; a sender of more has to wait, as for a window


@dataclass(slots=True)
class DelayProxy:
    """Forwards its connections to `host`:`port`, delayed. Belongs to one event loop."""

    host: str
    port: int
    round_trip_seconds: float
    loss: float = 0.0
    seed: int = 0
    num_losses: int = 0
    _random: random.Random = field(init=False)
    _server: asyncio.Server | None = None
    _connections: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Starts to listen. Returns the port."""
        self._server = await asyncio.start_server(self._accept, host, port)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Stops listening and ends all connections."""
        assert self._server is not None
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(self._connect(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            far_reader, far_writer = await asyncio.open_connection(self.host, self.port)
            writers.append(far_writer)
            async with asyncio.TaskGroup() as directions:
                directions.create_task(self._forward(reader, far_writer))
                directions.create_task(self._forward(far_reader, writer))
        except* OSError:
            pass  # either end has gone: both connections end
        finally:
            for open_writer in writers:
                open_writer.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Reads chunks and sets their times to leave; another task writes those that are due."""
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MAX_CHUNKS)
        sender = asyncio.create_task(_deliver(on_the_way, writer))
        loop, leaves_at = asyncio.get_running_loop(), 0.0
        try:
            while chunk := await reader.read(_CHUNK_BYTES):
                delay = self.round_trip_seconds / 2
                if self.loss and self._random.random() < self.loss:
                    self.num_losses += 1
                    delay += RETRANSMISSION_SECONDS
                leaves_at = max(leaves_at, loop.time() + delay)
                await on_the_way.put((leaves_at, chunk))
            await on_the_way.put((leaves_at, b""))
            await sender
        finally:
            sender.cancel()


async def _deliver(on_the_way: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
    """Writes the chunks when they are due. Ends at the empty chunk, which means that the sender has closed."""
    loop = asyncio.get_running_loop()
    while True:
        leaves_at, chunk = await on_the_way.get()
        if (delay := leaves_at - loop.time()) > 0:
            await asyncio.sleep(delay)
        if not chunk:
            writer.write_eof()
            return
        writer.write(chunk)
        await writer.drain()


async def _serve(arguments: argparse.Namespace) -> None:
    stopping = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stopping.set)
    proxy = DelayProxy(*_split(arguments.to), arguments.round_trip_ms / 1e3, arguments.loss, arguments.seed)
    await proxy.start(*_split(arguments.listen))
    await stopping.wait()
    await proxy.stop()


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="services.launch.delay_proxy", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--listen", required=True, metavar="HOST:PORT")
    parser.add_argument("--to", required=True, metavar="HOST:PORT")
    parser.add_argument("--round-trip-ms", type=float, default=0.0)
    parser.add_argument("--loss", type=float, default=0.0, help="share of the chunks that arrive 200 ms late")
    parser.add_argument("--seed", type=int, default=0, help="seed of the losses")
    asyncio.run(_serve(parser.parse_args(argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
