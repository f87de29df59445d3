"""A link that has nothing to say stays up; one to a draft worker that has frozen goes down."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable

from cluster.coordination.link import DraftLink, LinkEvent

QUIET_S = 9.0  # more than a server bears that counts pings: the fourth would end the connection
NOTICED_S = 5.0

WORKER = """
import asyncio, grpc
from protos.speculation.v1 import draft_pb2, draft_pb2_grpc, types_pb2
from services.worker import _SERVER_OPTIONS

class Quiet(draft_pb2_grpc.DraftServicer):
    async def Speculate(self, requests, context):
        async for _ in requests:
            pass

    async def Describe(self, request, context):
        return draft_pb2.DraftDescription(model=types_pb2.ModelDescription(tokenizer_fingerprint="same"))

async def main():
    server = grpc.aio.server(options=_SERVER_OPTIONS)
    draft_pb2_grpc.add_DraftServicer_to_server(Quiet(), server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_a_quiet_link_stays_and_a_frozen_worker_is_noticed() -> None:
    worker = subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True)
    events: list[LinkEvent] = []

    async def until(condition: Callable[[], bool], seconds: float) -> None:
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110  # a link tells an engine's thread, not this loop
                await asyncio.sleep(0.01)

    async def run(address: str) -> None:
        link = DraftLink(address, "same", events.append)
        running = asyncio.create_task(link.run())
        await until(lambda: link.is_up, NOTICED_S)
        await asyncio.sleep(QUIET_S)
        assert len(events) == 1
        worker.send_signal(signal.SIGSTOP)
        await until(lambda: not link.is_up, NOTICED_S)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    try:
        assert worker.stdout is not None
        asyncio.run(run(f"127.0.0.1:{worker.stdout.readline().strip()}"))
    finally:
        worker.kill()
        worker.wait()
