"""Tests of the router's view of a replica: its stream breaks and is reopened, it dies, it is one of several."""

from __future__ import annotations

import asyncio
import threading

import httpx
import pytest

from cluster.errors import UnavailableError
from protos.speculation.v1 import target_pb2
from services.router.targets.replicas import Replica
from tests.waiting import WAIT_S, wait_until


async def answer(replica: Replica, choice_index: int = 0) -> list[int]:
    request = target_pb2.GenerateRequest(prompt_token_ids=[70, 71, 72], max_tokens=3, choice_index=choice_index)
    return [token async for reply in replica.generate(request) for token in reply.token_ids]


def test_a_broken_stream_fails_every_call_and_the_next_call_opens_another(background, target, tokenizer):
    target.hang_after = 1

    async def run() -> list[BaseException | list[int]]:
        replica = Replica(target.address, tokenizer.fingerprint())
        await replica.poll()
        calls = [asyncio.create_task(answer(replica, choice)) for choice in range(5)]
        while len(target.requests) < 5:  # noqa: ASYNC110  # a scripted target has no event for it
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        await target.stop()
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert replica.problem == "was lost"
        assert replica.num_in_flight == 0
        for error in errors:
            assert isinstance(error, UnavailableError)
            assert error.message == "the target worker was lost; retry"
        assert len({id(error) for error in errors}) == 5
        target.hang_after = None
        await target.start()
        while replica.problem is not None:
            await replica.poll()
        assert await answer(replica, 1) == [71, 72, 70]
        await replica.close()

    background.run(run())


def test_a_call_to_nobody_is_an_error(background, tokenizer):
    async def run() -> None:
        replica = Replica("127.0.0.1:9", tokenizer.fingerprint())
        for _ in range(2):
            with pytest.raises(UnavailableError, match="lost"):
                await answer(replica)
        await replica.close()

    background.run(run())


def test_a_message_that_cannot_be_used_ends_the_stream(background, target, tokenizer, monkeypatch):
    message = target_pb2.GenerateReplies(calls=[0], num_tokens=[7])

    async def run() -> None:
        replica = Replica(target.address, tokenizer.fingerprint())
        monkeypatch.setattr("tests.services.router.conftest.encode_replies", lambda replies: message)
        with pytest.raises(UnavailableError, match="lost"):
            await answer(replica)
        monkeypatch.undo()
        assert await answer(replica) == [70, 71, 72]
        await replica.close()

    background.run(run())


def test_an_answer_sent_before_the_loss_does_not_bring_the_replica_back(background, target, tokenizer, monkeypatch):
    message = target_pb2.GenerateReplies(calls=[0], num_tokens=[7])

    async def run() -> None:
        replica = Replica(target.address, tokenizer.fingerprint())
        await replica.poll()
        target.describe_delay_s = 0.5
        poll = asyncio.create_task(replica.poll())
        await asyncio.sleep(0.1)
        monkeypatch.setattr("tests.services.router.conftest.encode_replies", lambda replies: message)
        with pytest.raises(UnavailableError, match="lost"):
            await answer(replica)
        monkeypatch.undo()
        await poll
        assert replica.problem == "it sent an unusable message: lengths add up to 7 but there are 0 values"
        target.describe_delay_s = 0.0
        await asyncio.sleep(0.2)  # the first pause after one takes 0.15 s at most
        await replica.poll()
        assert replica.problem is None
        await replica.close()

    background.run(run())


def test_streams_wait_for_the_restart_of_a_target_that_dies_amid_them(background, router, target):
    target.hang_after = 2
    streams: list[list] = []

    def stream() -> None:
        streams.append(router.stream(prompt=[70, 71], max_tokens=5, return_token_ids=True))

    threads = [threading.Thread(target=stream) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(target.requests) == 4)
    background.run(asyncio.sleep(0.1))
    background.run(target.stop())
    target.hang_after = None
    background.run(target.start())
    for thread in threads:
        thread.join()
    assert len(streams) == 4
    for events in streams:
        assert [event["choices"][0]["token_ids"] for event in events[:-1]] == [[70], [71], [70], [71], [70]]
        assert events[-1] == "[DONE]"


def test_requests_are_spread_over_the_replicas(new_target, new_router):
    targets = [new_target(), new_target()]
    for target in targets:
        target.hang_after = 1
        target.description.load.num_running = target.description.load.num_waiting = 0
    router = new_router([target.address for target in targets])
    release = threading.Event()

    def hold() -> None:
        with httpx.stream("POST", router.url + "/v1/completions", json={"prompt": [70], "stream": True}) as response:
            pieces = response.iter_raw()  # forgetting it would close the stream
            next(pieces)
            held.release()
            release.wait(WAIT_S)

    held = threading.Semaphore(0)
    threads = [threading.Thread(target=hold) for _ in range(4)]
    for thread in threads:
        thread.start()
        assert held.acquire(timeout=WAIT_S)
    assert [len(target.requests) for target in targets] == [2, 2]
    release.set()
    for thread in threads:
        thread.join()
