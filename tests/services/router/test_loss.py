"""How a replica that cannot finish its calls is told from one that can, and with which reason its calls end."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator

import grpc
import pytest

from cluster.errors import UnavailableError
from cluster.wire.replies import CallReply
from protos.speculation.v1 import target_pb2
from services.router.targets.replicas import Replica, ReplicaLostError
from tests.waiting import WAIT_S

from .conftest import ScriptedTarget
from .test_pool import until
from .test_replicas import answer


@contextlib.asynccontextmanager
async def polling(address: str, tokenizer) -> AsyncIterator[Replica]:
    replica = Replica(address, tokenizer.fingerprint())
    poll = asyncio.create_task(replica.poll_forever())
    await until(lambda: replica.description is not None)
    yield replica
    poll.cancel()
    await asyncio.gather(poll, return_exceptions=True)
    await replica.close()


async def begin(replica: Replica) -> AsyncGenerator[CallReply, None]:
    """A call that has brought its first tokens and brings no more."""
    replies = replica.generate(target_pb2.GenerateRequest(prompt_token_ids=[70, 71, 72], max_tokens=3))
    assert (await asyncio.wait_for(anext(replies), WAIT_S)).token_ids == [70]
    return replies


async def reason_of(replies: AsyncGenerator[CallReply, None]) -> str:
    with pytest.raises(ReplicaLostError) as caught:
        await asyncio.wait_for(anext(replies), WAIT_S)
    return caught.value.reason


def test_the_error_can_be_copied():
    error = copy.copy(ReplicaLostError("stuck"))
    assert (type(error), error.reason, error.http_status) == (ReplicaLostError, "stuck", 503)
    assert isinstance(error, UnavailableError)
    assert "makes no progress" in error.message


def test_a_worker_that_dies_is_lost(background, target, tokenizer):
    target.hang_after = 1

    async def run() -> None:
        async with polling(target.address, tokenizer) as replica:
            replies = await begin(replica)
            await target.stop()
            assert await reason_of(replies) == "lost"
            assert replica.status == "down"

    background.run(run())


def test_a_worker_that_refuses_a_call_as_unavailable_is_draining(background, target, tokenizer):
    target.fail_after = 1
    target.failure = (grpc.StatusCode.UNAVAILABLE, "the target is shutting down")

    async def run() -> None:
        async with polling(target.address, tokenizer) as replica:
            replies = await begin(replica)
            assert await reason_of(replies) == "draining"
            assert replica.problem == "is draining"
            await until(lambda: replica.problem is None)  # it says that it is not

    background.run(run())


class EndingTarget(ScriptedTarget):
    """Ends every stream in good order when the first call comes."""

    async def GenerateMany(self, request_iterator, context):
        async for _ in request_iterator:
            return
        yield


def test_a_worker_that_ends_the_stream_in_good_order_is_draining(background, tokenizer):
    async def run() -> None:
        target = EndingTarget(tokenizer)
        await target.start()
        async with polling(target.address, tokenizer) as replica:
            with pytest.raises(ReplicaLostError) as caught:
                await answer(replica)
            assert (caught.value.reason, replica.status) == ("draining", "draining")
        await target.stop()

    background.run(run())


def test_a_worker_that_drains_finishes_what_runs(background, target, tokenizer):
    target.delay_s = 0.3

    async def run() -> None:
        async with polling(target.address, tokenizer) as replica:
            replies = await begin(replica)
            target.description.is_draining = True
            await until(lambda: replica.problem == "is draining")
            assert replica.status == "draining"
            assert [token async for reply in replies for token in reply.token_ids] == [71, 72]

    background.run(run())


def test_a_worker_that_stands_still_is_given_up_with_all_its_calls(background, target, tokenizer):
    target.hang_after = 1

    async def run() -> None:
        async with polling(target.address, tokenizer) as replica:
            calls = [await begin(replica) for _ in range(3)]
            target.description.is_stuck = True
            assert [await reason_of(call) for call in calls] == ["stuck"] * 3
            assert replica.problem == "its engine makes no progress"
            assert replica.num_in_flight == 0
            await until(lambda: target.num_cancelled == 3)
            target.description.is_stuck = False
            target.hang_after = None
            await until(lambda: replica.problem is None)
            assert await answer(replica) == [70, 71, 72]

    background.run(run())


def test_a_worker_that_is_connected_and_silent_is_given_up(background, target, tokenizer):
    target.hang_after = 1

    async def run() -> None:
        async with polling(target.address, tokenizer) as replica:
            replies = await begin(replica)
            target.describe_delay_s = 60
            assert await reason_of(replies) == "lost"
            await until(lambda: target.num_cancelled == 1)
            assert "DEADLINE_EXCEEDED" in (replica.problem or "")

    background.run(run())


def test_one_slow_description_gives_nobody_up(background, target, tokenizer):
    target.hang_after = 1

    async def run() -> None:
        async with polling(target.address, tokenizer) as replica:
            replies = await begin(replica)
            target.describe_delay_s = 60
            await until(lambda: replica.is_silent)
            assert replica.problem is None
            assert replica.description is not None
            target.describe_delay_s = 0
            await until(lambda: not replica.is_silent)
            assert replica.problem is None
            assert replica.num_in_flight == 1
            await replies.aclose()

    background.run(run())


def test_a_worker_that_was_restarted_behind_its_address_is_lost(background, target, tokenizer):
    target.hang_after = 1
    target.description.epoch = 1

    async def run() -> None:
        async with polling(target.address, tokenizer) as replica:
            replies = await begin(replica)
            target.description.epoch = 2
            assert await reason_of(replies) == "lost"
            target.hang_after = None
            assert await answer(replica) == [70, 71, 72]
            await asyncio.sleep(0.6)  # a poll that sees the same epoch
            assert replica.problem is None

    background.run(run())


def test_a_stream_that_was_opened_before_the_first_description_belongs_to_the_epoch_in_it(
    background, target, tokenizer
):
    target.hang_after = 1
    target.description.epoch = 7

    async def run() -> None:
        replica = Replica(target.address, tokenizer.fingerprint())
        replies = await begin(replica)
        await replica.poll()
        assert replica.num_in_flight == 1
        target.description.epoch = 8
        await replica.poll()
        assert await reason_of(replies) == "lost"
        await replica.close()

    background.run(run())


def test_an_answer_that_comes_after_that_of_a_later_poll_is_dropped(background, target, tokenizer):
    async def run() -> None:
        replica = Replica(target.address, tokenizer.fingerprint())
        target.description.is_draining = True
        target.describe_delay_s = 0.3
        older = asyncio.create_task(replica.poll())
        await asyncio.sleep(0.1)
        target.description.is_draining = False
        target.describe_delay_s = 0
        await replica.poll()
        assert replica.problem is None
        await older
        assert replica.problem is None
        await replica.close()

    background.run(run())


FROZEN = """
import asyncio, sys
from pathlib import Path
from cluster.tokenization import Tokenizer
from tests.services.router.conftest import ScriptedTarget

async def main():
    target = ScriptedTarget(Tokenizer(Path(sys.argv[1])))
    target.hang_after = 1
    await target.start()
    print(target.address, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_a_worker_that_freezes_is_noticed(background, model_folder, tokenizer):
    process = subprocess.Popen([sys.executable, "-c", FROZEN, str(model_folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()

        async def run() -> None:
            async with polling(address, tokenizer) as replica:
                replies = await begin(replica)
                os.kill(process.pid, signal.SIGSTOP)
                frozen_at = time.monotonic()
                assert await reason_of(replies) == "lost"
                assert time.monotonic() < frozen_at + 50  # 3 s on a quiet machine

        background.run(run())
    finally:
        process.kill()
        process.wait()
