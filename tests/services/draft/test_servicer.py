"""Streams of a draft worker: a real server, the worker's real loop, and a drafter that is right by rule."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from cluster.config import Config
from cluster.drafting.worker import DraftWorker
from cluster.wire.codec import decode_reply, encode_request
from cluster.wire.messages import Advance, SpeculateReply, SpeculateRequest
from protos.speculation.v1 import draft_pb2, draft_pb2_grpc, types_pb2
from services.draft.servicer import DraftServicer
from services.draft.versions import Version
from tests.background_loop import BackgroundLoop
from tests.cluster.drafting.scripted import K, ScriptedDrafter, drafts, opening, proposal
from tests.waiting import wait_until

MODEL = types_pb2.ModelDescription(
    name="scripted", tokenizer_fingerprint="a fingerprint", vocab_size=100_000, max_model_len=1000, dtype="none"
)


class Served:
    """A draft worker behind its servicer, and a channel to it."""

    def __init__(self, loop: BackgroundLoop) -> None:
        self.loop = loop
        self.drafter = ScriptedDrafter()
        self.drafter.let_all()
        self.worker = DraftWorker(self.drafter)
        self.worker.start()
        loop.run(self._start())

    async def _start(self) -> None:
        self._server = grpc.aio.server()
        servicer = DraftServicer(Version(Config(), self.drafter, self.worker, MODEL))
        draft_pb2_grpc.add_DraftServicer_to_server(servicer, self._server)
        address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        self.channel = grpc.aio.insecure_channel(address)
        self.stub = draft_pb2_grpc.DraftStub(self.channel)

    async def _end(self) -> None:
        await self.channel.close()
        await self._server.stop(None)

    def stop(self) -> None:
        self.loop.run(self._end())
        self.worker.stop()

    def describe(self) -> draft_pb2.DraftDescription:
        async def describe() -> draft_pb2.DraftDescription:
            return await self.stub.Describe(types_pb2.DescribeRequest())

        description: draft_pb2.DraftDescription = self.loop.run(describe())
        return description


class Stream:
    """A coordinator's side of one stream."""

    def __init__(self, served: Served) -> None:
        self._loop = served.loop
        self._call = self._loop.run(self._begin(served))

    async def _begin(self, served: Served) -> Any:
        return served.stub.Speculate()

    def write(self, request: SpeculateRequest) -> None:
        self.write_message(encode_request(request))

    def write_message(self, message: draft_pb2.SpeculateRequest) -> None:
        self._loop.run(self._call.write(message))

    def open(self, *wire_ids: int, length: int = 2) -> None:
        self.write(SpeculateRequest(opens={wire_id: opening(wire_id, length=length) for wire_id in wire_ids}))

    def read(self) -> SpeculateReply:
        message = self._loop.run(self._call.read())
        assert message is not grpc.aio.EOF
        return decode_reply(message)

    def has_no_more(self) -> bool:
        return self._loop.run(self._call.read()) is grpc.aio.EOF

    def end(self, how: str) -> None:
        """`how`: as one who is done, or as one who is gone."""
        if how == "done":
            self._loop.run(self._call.done_writing())
        else:
            self._call.cancel()


@pytest.fixture
def served(loop: BackgroundLoop) -> Iterator[Served]:
    served = Served(loop)
    yield served
    served.stop()


@pytest.fixture
def stream(served: Served) -> Stream:
    return Stream(served)


class TestSpeculate:
    def test_what_is_opened_and_advanced_is_proposed_for(self, stream: Stream) -> None:
        stream.open(7)
        assert stream.read() == proposal(7, base=2)
        stream.write(SpeculateRequest(advances={7: Advance(7, 2, [*drafts(7, 2, 2), 999], K)}))
        assert stream.read() == proposal(7, base=5)

    def test_a_reply_says_what_it_took_and_what_room_there_is(self, stream: Stream, served: Served) -> None:
        served.drafter.credit = 77
        stream.open(7, 8)
        reply = stream.read()
        assert reply.timing is not None
        assert reply.timing.batch == 2
        assert reply.timing.held_seconds >= reply.timing.step_seconds > 0.0
        assert reply.credit == 77

    def test_what_is_not_held_is_said_to_be(self, stream: Stream, served: Served) -> None:
        served.drafter.capacity = 0
        request = SpeculateRequest(opens={1: opening(1)}, advances={2: Advance(2, 2, [202], K)})
        stream.write(request)
        assert stream.read() == SpeculateReply(refused={1}, lost={2})

    def test_streams_may_use_the_same_numbers(self, stream: Stream, served: Served) -> None:
        other = Stream(served)
        stream.open(7)
        other.open(7, length=5)
        assert stream.read() == proposal(7, base=2)
        assert other.read() == proposal(7, base=5)


class TestUnusableMessages:
    @pytest.mark.parametrize(
        ("columns", "details"),
        [
            (
                {"sequences": [7], "bases": [2], "lengths": [3], "token_ids": [1], "num_speculative_tokens": [K]},
                "lengths add up to 3 but there are 1 values",
            ),
            ({"sequences": [7], "bases": [2], "lengths": [1], "token_ids": [1]}, "shorter than"),
            (
                {
                    "sequences": [7],
                    "bases": [2],
                    "lengths": [1],
                    "token_ids": [1],
                    "num_speculative_tokens": [K],
                    "shapes": [1],
                },
                "refers to a shape that the message does not have",
            ),
        ],
        ids=["too few tokens", "a column too few", "a shape too few"],
    )
    def test_columns_that_do_not_fit_are_an_invalid_argument(
        self, columns: dict[str, list[int]], details: str, stream: Stream, served: Served
    ) -> None:
        stream.open(7)
        assert stream.read() == proposal(7, base=2)
        stream.write_message(draft_pb2.SpeculateRequest(advance=draft_pb2.Advance(**columns)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            stream.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert details in caught.value.details()
        wait_until(lambda: served.worker.num_sequences == 0)  # they are gone with their stream

    def test_what_is_no_message_is_an_invalid_argument(self, served: Served) -> None:
        async def send() -> None:
            method = served.channel.stream_stream("/speculation.v1.Draft/Speculate")
            async for _ in method(iter([b"\xff\xff"])):
                pass

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            served.loop.run(send())
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    def test_a_flood_waits_in_the_peer(self, served: Served, stream: Stream) -> None:
        message = draft_pb2.SpeculateRequest(close=range(2**63, 2**63 + 20_000)).SerializeToString()  # 200 kB
        served.drafter.hold()
        stream.open(7)
        served.drafter.next_step()  # in which the loop stays

        async def flood() -> None:
            nonlocal num_written
            call = served.channel.stream_stream("/speculation.v1.Draft/Speculate")()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(3.0):
                    for num_written in range(1000):  # noqa: B007  # 200 MB
                        await call.write(message)
            call.cancel()

        num_written = 0
        served.loop.run(flood())
        served.drafter.let_all()
        assert 0 < num_written < 500

    def test_other_streams_go_on(self, stream: Stream, served: Served) -> None:
        bad = Stream(served)
        stream.open(7)
        assert stream.read() == proposal(7, base=2)
        bad.write_message(draft_pb2.SpeculateRequest(advance=draft_pb2.Advance(sequences=[7])))
        with pytest.raises(grpc.aio.AioRpcError):
            bad.read()
        stream.write(SpeculateRequest(advances={7: Advance(7, 2, [702], K)}))
        assert stream.read() == proposal(7, base=3)
        assert served.worker.error is None


class TestEnds:
    @pytest.mark.parametrize("how", ["done", "gone"])
    def test_a_stream_that_ends_takes_its_sequences_with_it(self, how: str, stream: Stream, served: Served) -> None:
        other = Stream(served)
        stream.open(1, 2)
        other.open(1, 3)
        assert stream.read().proposals.keys() == {1, 2}
        assert other.read().proposals.keys() == {1, 3}
        assert served.worker.num_sequences == 4
        stream.end(how)
        wait_until(lambda: served.worker.num_sequences == 2)
        assert served.drafter.wire_ids == {1, 3}
        other.write(SpeculateRequest(advances={1: Advance(1, 2, [102], K)}))
        assert other.read() == proposal(1, base=3)

    def test_a_reply_that_cannot_be_written_ends_the_stream(self, stream: Stream, served: Served) -> None:
        """A stream that stays open without a writer would leave the coordinator waiting for proposals."""
        served.drafter.credit = -1
        stream.open(7)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            stream.read()
        assert caught.value.code() is grpc.StatusCode.UNKNOWN
        wait_until(lambda: served.worker.num_sequences == 0)
        served.drafter.credit = None
        another = Stream(served)
        another.open(7)
        assert another.read() == proposal(7, base=2)

    def test_one_who_is_done_writing_is_told_that_it_is_over(self, stream: Stream) -> None:
        stream.open(7)
        assert stream.read() == proposal(7, base=2)
        stream.end("done")
        assert stream.has_no_more()


class TestDescribe:
    def test_says_which_model_and_how_busy(self, served: Served, stream: Stream) -> None:
        served.drafter.num_used_blocks = 3
        assert served.describe().load == types_pb2.Load(num_running=0, num_used_blocks=3, num_blocks=10)
        stream.open(1, 2)
        stream.read()
        description = served.describe()
        assert description.model == MODEL
        assert description.load == types_pb2.Load(num_running=2, num_used_blocks=3, num_blocks=10)

    def test_the_epoch_is_the_servicers(self, served: Served, loop: BackgroundLoop) -> None:
        restarted = Served(loop)
        epoch = served.describe().epoch
        assert served.describe().epoch == epoch != restarted.describe().epoch
        restarted.stop()
