"""A link to a draft worker that has frozen goes down, although nothing is asked of it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from cluster.coordination.link import DraftLink
from tests.waiting import WAIT_S

WORKER = """
import asyncio, grpc
from protos.speculation.v1 import draft_pb2, draft_pb2_grpc, types_pb2
from services.worker import SERVER_OPTIONS

class Quiet(draft_pb2_grpc.DraftServicer):
    async def Speculate(self, requests, context):
        async for _ in requests:
            pass

    async def Describe(self, request, context):
        return draft_pb2.DraftDescription(model=types_pb2.ModelDescription(tokenizer_fingerprint="same"))

async def main():
    server = grpc.aio.server(options=SERVER_OPTIONS)
    draft_pb2_grpc.add_DraftServicer_to_server(Quiet(), server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture
def worker() -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, f"127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.kill()
        process.wait()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110  # a link tells an engine's thread, not this loop
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def linked(address: str) -> AsyncIterator[DraftLink]:
    link = DraftLink(address, "same", notify=lambda event: None)
    running = asyncio.create_task(link.run())
    await until(lambda: link.is_up)
    yield link
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def test_a_frozen_worker_is_noticed(worker) -> None:
    async def run() -> None:
        async with linked(worker[1]) as link:
            worker[0].send_signal(signal.SIGSTOP)
            await until(lambda: not link.is_up)

    asyncio.run(run())
