"""The stream that all calls to a target share: one call is not another's business."""

from __future__ import annotations

import asyncio

import pytest

from cluster.errors import UnavailableError
from cluster.wire.replies import CallReply, encode_replies
from protos.speculation.v1 import target_pb2
from services.router.targets.call_stream import Call, CallStream

LENGTH = target_pb2.FINISH_REASON_LENGTH


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

    def done(self) -> bool:
        return False

    async def initial_metadata(self) -> tuple[()]:
        return ()

    async def __aiter__(self):
        await asyncio.sleep(0.01)  # until every call waits
        yield encode_replies({call: CallReply([1]) for call in range(self._num_calls)}).SerializeToString()
        for _ in range(3):
            await asyncio.sleep(0)
        yield encode_replies({call: CallReply([2], LENGTH) for call in range(self._num_calls)}).SerializeToString()
        await asyncio.sleep(60)


def test_a_message_that_comes_early_is_merged_into_what_waits_for_its_turn():
    async def replies(call: Call) -> list[list[int]]:
        taken = []
        while not call.has_ended:
            taken.append((await call.take()).token_ids)
        return taken

    async def run() -> list[list[list[int]]]:
        stream = CallStream(TwoMessages(200), lambda error: error, lambda _: UnavailableError("lost"))
        calls = [stream.start(target_pb2.GenerateRequest(max_tokens=2)) for _ in range(200)]
        taken = await asyncio.gather(*map(replies, calls))
        await stream.close()
        return taken

    taken = asyncio.run(run())
    num_early = taken.index([[1, 2]])
    assert 0 < num_early < 150
    assert taken == [[[1], [2]]] * num_early + [[[1, 2]]] * (200 - num_early)


class Congested:
    """A stream that takes one message, and the next when it `flows` again."""

    def __init__(self) -> None:
        self.written: list[target_pb2.GenerateCommands] = []
        self.flows = asyncio.Event()

    async def write(self, commands: target_pb2.GenerateCommands) -> None:
        self.written.append(commands)
        await self.flows.wait()

    def cancel(self) -> None: ...

    def done(self) -> bool:
        return False

    async def initial_metadata(self) -> tuple[()]:
        return ()

    async def __aiter__(self):
        await asyncio.sleep(60)
        yield


def test_what_was_left_before_it_was_sent_is_never_sent():
    async def run() -> list[target_pb2.GenerateCommands]:
        congested = Congested()
        stream = CallStream(congested, lambda error: error, lambda _: UnavailableError("lost"))
        sent = stream.start(target_pb2.GenerateRequest(request_id="sent"))
        await asyncio.sleep(0.01)
        left = [stream.start(target_pb2.GenerateRequest(prompt_token_ids=range(1000))) for _ in range(20)]
        stream.start(target_pb2.GenerateRequest(request_id="wanted"))
        for call in (sent, *left):
            call.cancel()
        congested.flows.set()
        await asyncio.sleep(0.01)
        await stream.close()
        return congested.written

    first, *others = asyncio.run(run())
    assert [start.request.request_id for start in first.start] == ["sent"]
    assert [start.request.request_id for message in others for start in message.start] == ["wanted"]
    assert [call for message in others for call in message.cancel] == [first.start[0].call]


def test_a_client_that_does_not_read_holds_up_nobody(router, target):
    with router.client.stream(
        "POST", "/v1/completions", json={"prompt": [70], "stream": True, "max_tokens": 150}
    ) as unread:
        assert unread.status_code == 200
        for _ in range(5):
            assert router.complete(prompt=[70, 71], max_tokens=20).status_code == 200
        assert unread.read().endswith(b"data: [DONE]\n\n")
