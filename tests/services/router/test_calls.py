"""The stream that all calls to a target share: it breaks, is opened anew, and one call is not another's business."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cluster.errors import UnavailableError
from cluster.wire.replies import CallReply, encode_replies
from protos.speculation.v1 import target_pb2
from services.router.calls import Call, CallStream
from services.router.targets import Target

from .conftest import wait_until
from .test_completions import wait_for_health

LENGTH = target_pb2.FINISH_REASON_LENGTH


def request(choice_index: int = 0, max_tokens: int = 3) -> target_pb2.GenerateRequest:
    return target_pb2.GenerateRequest(prompt_token_ids=[70, 71, 72], max_tokens=max_tokens, choice_index=choice_index)


async def answer(target: Target, choice_index: int = 0) -> list[int]:
    return [token async for reply in target.generate(request(choice_index)) for token in reply.token_ids]


def test_what_is_not_taken_is_merged_and_an_error_comes_after_the_tokens():
    async def run() -> None:
        call = Call(lambda: None)
        for token in range(50):
            call.put(CallReply([token]))
        call.put(CallReply(error=UnavailableError("lost")))
        assert (await call.take()).token_ids == list(range(50))
        assert not call.has_ended
        with pytest.raises(UnavailableError, match="lost"):
            await call.take()
        assert call.has_ended

    asyncio.run(run())


class TwoMessages:
    """A stream whose second message comes when some calls have had their turn with the first, and others have not."""

    def __init__(self, num_calls: int) -> None:
        self._num_calls = num_calls

    async def write(self, commands: target_pb2.GenerateCommands) -> None:
        assert len(commands.start) == self._num_calls

    def cancel(self) -> None: ...

    async def __aiter__(self):
        await asyncio.sleep(0.01)  # until every call waits
        yield encode_replies({call: CallReply([1]) for call in range(self._num_calls)})
        for _ in range(3):
            await asyncio.sleep(0)
        yield encode_replies({call: CallReply([2], LENGTH) for call in range(self._num_calls)})
        await asyncio.sleep(60)


def test_a_message_that_comes_early_is_merged_into_what_waits_for_its_turn():
    async def replies(call: Call) -> list[list[int]]:
        taken = []
        while not call.has_ended:
            taken.append((await call.take()).token_ids)
        return taken

    async def run() -> list[list[list[int]]]:
        stream = CallStream(TwoMessages(200), lambda error: error)
        calls = [stream.start(request()) for _ in range(200)]
        taken = await asyncio.gather(*map(replies, calls))
        await stream.close()
        return taken

    taken = asyncio.run(run())
    num_early = taken.index([[1, 2]])
    assert 0 < num_early < 150
    assert taken == [[[1], [2]]] * num_early + [[[1, 2]]] * (200 - num_early)


def test_a_broken_stream_fails_every_call_and_the_next_call_opens_another(background, target, tokenizer):
    target.hang_after = 1

    async def run() -> list[BaseException | list[int]]:
        router_side = Target(target.address, tokenizer.fingerprint())
        await router_side.poll()
        calls = [asyncio.create_task(answer(router_side, choice)) for choice in range(5)]
        while len(target.requests) < 5:  # noqa: ASYNC110  # a scripted target has no event for it
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        await target.stop()
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert router_side.problem == "was lost"
        assert router_side.num_in_flight == 0
        for error in errors:
            assert isinstance(error, UnavailableError)
            assert error.message == "the target worker was lost; retry"
        assert len({id(error) for error in errors}) == 5
        target.hang_after = None
        await target.start()
        while router_side.problem is not None:
            await router_side.poll()
        assert await answer(router_side, 1) == [71, 72, 70]
        await router_side.close()

    background.run(run())


def test_a_call_to_nobody_is_an_error(background, tokenizer):
    async def run() -> None:
        router_side = Target("127.0.0.1:9", tokenizer.fingerprint())
        for _ in range(2):
            with pytest.raises(UnavailableError, match="lost"):
                await answer(router_side)
        await router_side.close()

    background.run(run())


def test_a_message_that_cannot_be_used_ends_the_stream(background, target, tokenizer, monkeypatch):
    message = target_pb2.GenerateReplies(calls=[0], num_tokens=[7])

    async def run() -> None:
        router_side = Target(target.address, tokenizer.fingerprint())
        monkeypatch.setattr("tests.services.router.conftest.encode_replies", lambda replies: message)
        with pytest.raises(UnavailableError, match="lost"):
            await answer(router_side)
        monkeypatch.undo()
        assert await answer(router_side) == [70, 71, 72]
        await router_side.close()

    background.run(run())


def test_a_client_that_does_not_read_holds_up_nobody(router, target):
    with router.client.stream(
        "POST", "/v1/completions", json={"prompt": [70], "stream": True, "max_tokens": 150}
    ) as unread:
        assert unread.status_code == 200
        for _ in range(5):
            assert router.complete(prompt=[70, 71], max_tokens=20).status_code == 200
        assert unread.read().endswith(b"data: [DONE]\n\n")


def test_a_target_that_dies_amid_streams_ends_each_with_an_error(background, router, target):
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
    for thread in threads:
        thread.join()
    for events in streams:
        assert [event["choices"][0]["token_ids"] for event in events[:-1]] == [[70], [71]]
        assert events[-1]["error"]["type"] == "unavailable_error"
        assert "lost" in events[-1]["error"]["message"]
    target.hang_after = None
    background.run(target.start())
    wait_for_health(router)
    assert router.complete(prompt=[70]).status_code == 200
