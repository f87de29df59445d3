"""Calls and streams of a target: what a slow caller gets, and what becomes of calls that end early or badly."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Mapping, Sequence

import grpc
import pytest

from cluster.config import Config
from cluster.coordination.timeline import AnswerSpan, StepSpan, Timeline
from cluster.engine.limits import StepLimits
from cluster.engine.sequence import FinishReason
from cluster.errors import InvalidRequestError, NotFoundError, OverloadedError, UnavailableError
from cluster.speculation.params import SamplingParams
from cluster.targets.base import (
    GenerationOutput,
    GenerationRequest,
    Publish,
    Target,
    TargetLoad,
    TargetModel,
    no_adapter,
)
from cluster.telemetry.metrics import Reading
from cluster.wire.codec import encode_sampling
from cluster.wire.replies import CallReply, RoundCounts, decode_replies
from protos.speculation.v1 import target_pb2, target_pb2_grpc, types_pb2
from services.router.targets.replicas import Replica
from services.target.router_calls import Calls, RouterStream
from services.target.servicer import TargetServicer
from tests.waiting import WAIT_S, turns, until

SAMPLING = encode_sampling(SamplingParams())
LENGTH = target_pb2.FINISH_REASON_LENGTH


class HandDrivenTarget(Target):
    """Does what a test tells it: `step` commits tokens for one request."""

    model = TargetModel("hand-driven", dtype="none", vocab_size=512, eos_token_ids=())
    limits = StepLimits(max_model_len=4096, max_num_seqs=64, max_num_batched_tokens=512)
    is_stuck = False

    def __init__(self) -> None:
        self.block_size, self.caches_prefixes = 16, True
        self.requests: list[str] = []
        self.aborted: list[str] = []
        self.held: dict[str, str] = {}
        self.spans: Timeline | None = None

    def start(self, publish: Publish) -> None:
        self._publish = publish

    @property
    def adapters(self) -> Mapping[str, str]:
        return self.held

    async def load_adapter(self, name: str, path: str, *, replace: bool) -> str:
        if path == "broken":
            raise InvalidRequestError("it is broken")
        self.held[name] = f"{path} {replace}"
        return self.held[name]

    async def unload_adapter(self, name: str) -> int:
        del self.held[name]
        return 3

    def submit(self, request: GenerationRequest) -> None:
        if request.adapter and self.held.get(request.adapter) != request.adapter_fingerprint:
            raise NotFoundError(no_adapter(request.adapter))
        if request.max_tokens == 1111:
            raise ZeroDivisionError("not foreseen")
        self.requests.append(request.request_id)

    def step(self, request_id: str, *token_ids: int, drafts: int = 0, accepted: int = 0, is_last: bool = False) -> None:
        reason = FinishReason.LENGTH if is_last else None
        self._publish([GenerationOutput(request_id, token_ids, reason, drafts, accepted)])

    def stop(self) -> None: ...

    async def run_links(self, endpoints: AsyncIterator[Sequence[str]]) -> None: ...

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def load(self) -> TargetLoad:
        return TargetLoad(0, 0, 0, 1, 0)

    @property
    def timeline(self) -> Timeline | None:
        return self.spans

    def readings(self):
        return (
            Reading("outrider_steps", "Steps.", 7, is_counter=True, labels={"kind": "verify"}),
            Reading("outrider_ejections", "Of no use to who looks on.", 1),
        )


class Served:
    """A target behind its servicer, and a channel to it."""

    def __init__(self) -> None:
        self.target = HandDrivenTarget()
        self.calls = Calls(self.target, 8)
        self.target.start(self.calls.publish)
        self.server = grpc.aio.server()
        servicer = TargetServicer(self.calls, self.target, Config(), "fingerprint")
        target_pb2_grpc.add_TargetServicer_to_server(servicer, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.channel = grpc.aio.insecure_channel(self.address)
        self.stub = target_pb2_grpc.TargetStub(self.channel)


def with_served(test):
    """Runs an async test with a target that is served."""

    @functools.wraps(test)
    def run() -> None:
        async def body() -> None:
            served = Served()
            await served.server.start()
            try:
                await asyncio.wait_for(test(served), timeout=WAIT_S)
            finally:
                await served.channel.close()
                await served.server.stop(None)

        asyncio.run(body())

    del run.__wrapped__  # pytest would ask for its argument
    return run


@contextlib.asynccontextmanager
async def calling(served: Served) -> AsyncIterator[Replica]:
    caller = Replica(served.address, "fingerprint")
    yield caller
    await caller.close()


def request(request_id: str = "one", **fields) -> target_pb2.GenerateRequest:
    fields = {"prompt_token_ids": [1, 2], "max_tokens": 2000} | fields
    return target_pb2.GenerateRequest(**{"request_id": request_id, "sampling": SAMPLING} | fields)


def start(call: int, **fields) -> target_pb2.GenerateCommands:
    return target_pb2.GenerateCommands(start=[target_pb2.StartCall(call=call, request=request(**fields))])


def cancel(*calls: int) -> target_pb2.GenerateCommands:
    return target_pb2.GenerateCommands(cancel=calls)


async def read(stream) -> dict[int, CallReply]:
    message = await stream.read()
    assert message is not grpc.aio.EOF
    return decode_replies(message)


def test_a_stream_keeps_one_reply_a_call():
    async def run() -> dict[int, CallReply]:
        stream = RouterStream()
        for token in range(100):
            stream.put(1, CallReply([token]))
            stream.put(2, CallReply([token], rounds=(RoundCounts(4, token % 5),)))
            stream.put(3, CallReply([token]))
        stream.put(1, CallReply([100], LENGTH))
        stream.drop(3)
        return await stream.take()

    replies = asyncio.run(run())
    assert replies == {
        1: CallReply(list(range(101)), LENGTH),
        2: CallReply(list(range(100)), rounds=[RoundCounts(4, token % 5, token) for token in range(100)]),
    }


@with_served
async def test_who_looks_on_is_told_of_each_step_once(served):
    observation = await served.stub.Observe(target_pb2.ObserveRequest())
    assert not observation.tells_steps
    assert [(reading.name, dict(reading.labels), reading.value) for reading in observation.readings] == [
        ("outrider_steps", {"kind": "verify"}, 7)
    ]
    spans = served.target.spans = Timeline()
    spans.steps.add(StepSpan(10.0, 0.5, 0.25, 2, 8, has_prompts=False))
    spans.answers.add(AnswerSpan(9.5, 0.5, 0.25, 0.125, 2, 2, "draft:1"))
    first = await served.stub.Observe(target_pb2.ObserveRequest())
    assert first.tells_steps
    assert first.epoch == (await served.stub.Describe(types_pb2.DescribeRequest())).epoch
    (step,), (answer,) = first.steps, first.answers
    assert (step.ended_at, step.waited_seconds, step.seconds, step.num_rows) == (10.0, 0.5, 0.25, 8)
    assert (answer.came_at, answer.held_seconds, answer.draft) == (9.5, 0.25, "draft:1")
    asked = target_pb2.ObserveRequest(from_step=first.next_step, from_answer=first.next_answer)
    again = await served.stub.Observe(asked)
    assert not again.steps
    assert not again.answers


@with_served
async def test_what_waits_is_bounded(served):
    served.calls = Calls(served.target, 8, max_waiting_tokens=1000)
    served.target.start(served.calls.publish)
    with served.calls.stream() as stream:

        def begin(call: int, num_tokens: int, **fields) -> bool:
            served.calls.start(stream, call, request(f"r{call}", prompt_token_ids=[1] * num_tokens, **fields))
            return call in stream.running

        assert begin(0, 2000)  # alone any prompt may wait
        assert not begin(1, 1)
        (error,) = [reply.error for reply in (await stream.take()).values()]
        assert isinstance(error, OverloadedError)
        assert begin(2, 500, num_generated_tokens=1)  # what has begun elsewhere is not lost
        served.target.step("r0#0", 7)
        assert (await stream.take())[0].token_ids == [7]
        assert begin(3, 500)
        served.calls.cancel(stream, 2)
        assert begin(4, 1)  # counted as 256
        assert not begin(5, 256)
        served.target.step(stream.running[4], 7, is_last=True)
        await until(lambda: 4 not in stream.running)
        assert begin(6, 256)


@with_served
async def test_one_message_has_what_a_step_committed_for_all_calls(served):
    stream = served.stub.GenerateMany()
    for call in range(3):
        await stream.write(start(call, request_id=f"r{call}"))
    await until(lambda: len(served.target.requests) == 3)
    for name in served.target.requests:
        served.target.step(name, 7, 8, drafts=4, accepted=1, is_last=name == "r2#2")
    rounds = [RoundCounts(4, 1)]
    assert await read(stream) == {
        0: CallReply([7, 8], rounds=rounds),
        1: CallReply([7, 8], rounds=rounds),
        2: CallReply([7, 8], LENGTH, rounds=rounds),
    }


@with_served
async def test_a_router_that_does_not_read_gets_few_messages_and_every_token(served):
    stream = served.stub.GenerateMany()
    await stream.write(start(5))
    await until(lambda: served.target.requests)
    num_steps, tokens = 1000, [300] * 2000
    for step in range(num_steps):
        served.target.step("one#0", *tokens, drafts=9, accepted=step % 10, is_last=step == num_steps - 1)
        await asyncio.sleep(0)
    reply, num_messages = CallReply(), 0
    while reply.finish_reason != LENGTH:
        reply.merge((await read(stream))[5])
        num_messages += 1
    assert len(reply.token_ids) == num_steps * len(tokens)
    assert reply.rounds == [RoundCounts(9, step % 10, 2000 * step) for step in range(num_steps)]
    assert num_messages < num_steps / 2


@with_served
async def test_what_is_no_message_is_an_invalid_argument(served):
    method = served.channel.stream_stream("/speculation.v1.Target/GenerateMany")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await method(iter([b"\xff\xff"])).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def _refuse_many(stream: RouterStream, number: int) -> None:
    for call in range(number):
        await stream.has_room()
        stream.put(call, CallReply(error=InvalidRequestError("no")))


def test_further_calls_wait_until_replies_to_those_that_ended_are_read():
    async def run() -> None:
        stream = RouterStream()
        refusing = asyncio.create_task(_refuse_many(stream, 3000))
        await turns()
        num_replies = []
        while sum(num_replies) < 3000:
            num_replies.append(len(await stream.take()))
            await turns()
        assert max(num_replies) < 1100
        await refusing

    asyncio.run(run())


@with_served
async def test_a_message_of_many_calls_lets_others_have_their_turn(served):
    stream, other = served.stub.GenerateMany(), served.stub.GenerateMany()
    many = [target_pb2.StartCall(call=call, request=request(f"r{call}")) for call in range(500)]
    await stream.write(target_pb2.GenerateCommands(start=many))
    await until(lambda: served.target.requests)
    assert len(served.target.requests) < 500
    await other.write(start(1))
    await until(lambda: len(served.target.requests) == 501)


@with_served
async def test_a_router_that_leaves_while_a_message_waits_to_be_sent_frees_its_calls(served):
    stream = served.stub.GenerateMany()
    for call in range(2):
        await stream.write(start(call))
    await until(lambda: len(served.target.requests) == 2)
    for _ in range(100):  # far more than a connection holds
        for name in served.target.requests:
            served.target.step(name, *[300] * 50_000)
        await asyncio.sleep(0.001)
    stream.cancel()
    await until(lambda: sorted(served.target.aborted) == ["one#0", "one#1"])


@with_served
async def test_a_client_that_takes_slowly_gets_few_replies_and_holds_up_nobody(served):
    async with calling(served) as caller:
        slow, quick = caller.generate(request("slow")), caller.generate(request("quick"))
        first = asyncio.create_task(anext(slow))
        second = asyncio.create_task(anext(quick))
        await until(lambda: len(served.target.requests) == 2)
        served.target.step("slow#0", 0)
        assert await first == CallReply([0])
        for token in range(1, 200):
            served.target.step("slow#0", token, drafts=1, accepted=token % 2, is_last=token == 199)
            served.target.step("quick#1", token)
            assert (await second).token_ids == [token]
            second = asyncio.create_task(anext(quick))
        rest = await anext(slow)
        assert rest.token_ids == list(range(1, 200))
        assert rest.rounds == [RoundCounts(1, token % 2, token - 1) for token in range(1, 200)]
        with pytest.raises(StopAsyncIteration):
            await anext(slow)
        second.cancel()


@with_served
async def test_cancelling_a_call_frees_it_and_no_other(served):
    stream = served.stub.GenerateMany()
    for call in (1, 2):
        await stream.write(start(call))
    await until(lambda: len(served.target.requests) == 2)
    await stream.write(cancel(1, 9))  # the second is unknown
    await until(lambda: served.target.aborted)
    served.target.step("one#0", 5)
    served.target.step("one#1", 6, is_last=True)
    assert await read(stream) == {2: CallReply([6], LENGTH)}
    await stream.write(cancel(2))  # has ended
    await stream.write(start(3))
    await until(lambda: len(served.target.requests) == 3)
    assert served.target.aborted == ["one#0"]


@with_served
async def test_closing_a_generator_frees_its_sequence(served):
    async with calling(served) as caller:
        leaving, staying = caller.generate(request("leaving")), caller.generate(request("staying"))
        first = asyncio.create_task(anext(leaving))
        other = asyncio.create_task(anext(staying))
        await until(lambda: len(served.target.requests) == 2)
        served.target.step("leaving#0", 1)
        assert await first == CallReply([1])
        assert caller.num_in_flight == 2
        await leaving.aclose()
        await until(lambda: served.target.aborted == ["leaving#0"])
        assert caller.num_in_flight == 1
        served.target.step("staying#1", 2)
        assert await other == CallReply([2])


@pytest.mark.parametrize("is_half_closed", [False, True])
def test_a_stream_that_ends_frees_all_its_calls(is_half_closed):
    @with_served
    async def run(served):
        stream, other = served.stub.GenerateMany(), served.stub.GenerateMany()
        await other.write(start(0))
        await until(lambda: served.target.requests)
        for call in range(3):
            await stream.write(start(call))
        await until(lambda: len(served.target.requests) == 4)
        if is_half_closed:
            await stream.done_writing()
            assert await stream.read() is grpc.aio.EOF
        else:
            stream.cancel()
        await until(lambda: served.target.aborted == ["one#1", "one#2", "one#3"])
        served.target.step("one#0", 4)
        assert await read(other) == {0: CallReply([4])}

    run()


@with_served
async def test_a_call_that_cannot_be_started_leaves_the_others_alone(served):
    async with calling(served) as caller:
        good = asyncio.create_task(anext(caller.generate(request("good"))))
        await until(lambda: served.target.requests)
        with pytest.raises(InvalidRequestError, match="leaves nothing to generate") as caught:
            await anext(caller.generate(request(max_tokens=0)))
        assert caught.value.param == "max_tokens"
        with pytest.raises(InvalidRequestError, match="the prompt is empty") as caught:
            await anext(caller.generate(request(prompt_token_ids=[])))
        assert caught.value.param == "prompt"
        with pytest.raises(InvalidRequestError, match="token ID 600") as caught:
            await anext(caller.generate(request(prompt_token_ids=[600])))
        assert caught.value.param == "prompt"
        with pytest.raises(Exception, match="the target worker failed"):
            await anext(caller.generate(request(max_tokens=1111)))
        odd = types_pb2.SamplingParams(logit_bias_token_ids=[3])
        with pytest.raises(InvalidRequestError, match="logit_bias has 1 token IDs and 0 values"):
            await anext(caller.generate(request(sampling=odd)))
        served.target.step("good#0", 3)
        assert await good == CallReply([3])
        assert served.target.requests == ["good#0"]


@with_served
async def test_a_number_that_is_running_cannot_be_started_again(served):
    stream = served.stub.GenerateMany()
    await stream.write(start(1))
    await stream.write(start(1))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await until(lambda: served.target.aborted == ["one#0"])


@with_served
async def test_several_steps_of_a_call_come_as_one_reply_up_to_its_last(served):
    async with calling(served) as caller:
        replies = caller.generate(request())
        first = asyncio.create_task(anext(replies))
        await until(lambda: served.target.requests)
        served.target.step("one#0", 1, 2, drafts=4, accepted=1)
        served.target.step("one#0", 3, 4, 5, drafts=4, accepted=2)
        served.target.step("one#0", 6, is_last=True)
        assert await first == CallReply([1, 2, 3, 4, 5, 6], LENGTH, rounds=[RoundCounts(4, 1), RoundCounts(4, 2, 2)])
        with pytest.raises(StopAsyncIteration):
            await anext(replies)
    assert served.target.aborted == []


@with_served
async def test_draining_starts_nothing_more_and_lets_what_runs_finish(served):
    running, idle = served.stub.GenerateMany(), served.stub.GenerateMany()
    await idle.write(cancel(0))
    await running.write(start(1))
    await until(lambda: served.target.requests)
    draining = asyncio.create_task(served.calls.drain(20.0))
    assert await idle.read() is grpc.aio.EOF
    await running.write(start(2))
    refused = (await read(running))[2].error
    assert isinstance(refused, UnavailableError)
    assert (await served.stub.Describe(types_pb2.DescribeRequest())).is_draining
    served.target.step("one#0", 4, is_last=True)
    assert await read(running) == {1: CallReply([4], LENGTH)}
    assert await running.read() is grpc.aio.EOF
    assert served.target.aborted == []
    await draining


@with_served
async def test_what_still_runs_when_draining_is_over_is_given_up(served):
    stream = served.stub.GenerateMany()
    await stream.write(start(1))
    await until(lambda: served.target.requests)
    served.target.step("one#0", 4)
    assert await read(stream) == {1: CallReply([4])}
    await served.calls.drain(0.1)
    assert isinstance((await read(stream))[1].error, UnavailableError)
    assert await stream.read() is grpc.aio.EOF
    assert served.target.aborted == ["one#0"]


@with_served
async def test_the_engines_end_ends_every_stream_with_an_error_after_its_last_tokens(served):
    """Not as one that drains: its calls may be what it died of."""
    streams = [served.stub.GenerateMany(), served.stub.GenerateMany()]
    for stream in streams:
        await stream.write(start(1))
    await until(lambda: len(served.target.requests) == 2)
    served.target.error = RuntimeError("out of memory")
    for name in served.target.requests:
        served.target.step(name, 4)
    await asyncio.sleep(0)
    await served.calls.drain(20.0)
    for stream in streams:
        assert await read(stream) == {1: CallReply([4])}
        with pytest.raises(grpc.aio.AioRpcError, match="the target's engine has stopped"):
            await stream.read()


@with_served
async def test_a_stuck_engine_says_so(served):
    assert not (await served.stub.Describe(types_pb2.DescribeRequest())).is_stuck
    served.target.is_stuck = True
    assert (await served.stub.Describe(types_pb2.DescribeRequest())).is_stuck


@with_served
async def test_adapters_are_described_loaded_and_unloaded(served):
    loaded = await served.stub.LoadAdapter(target_pb2.LoadAdapterRequest(name="a/b", path="x", replace=True))
    assert loaded.fingerprint == "x True"
    description = await served.stub.Describe(types_pb2.DescribeRequest())
    assert dict(description.adapters) == {"a/b": "x True"}
    for name, path, reason in (
        ("a", "broken", "it is broken"),
        ("a b", "x", "not a valid adapter name"),
        ("", "x", "not a valid adapter name"),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match=reason) as error:
            await served.stub.LoadAdapter(target_pb2.LoadAdapterRequest(name=name, path=path))
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    unloaded = await served.stub.UnloadAdapter(target_pb2.UnloadAdapterRequest(name="a/b"))
    assert unloaded.num_running == 3
    assert not served.target.held


@with_served
async def test_a_request_for_other_contents_is_refused(served):
    served.target.held["a"] = "one"
    stream = served.stub.GenerateMany()
    await stream.write(start(1, adapter="a", adapter_fingerprint="one"))
    await until(lambda: len(served.target.requests) == 1)
    await stream.write(start(2, adapter="a", adapter_fingerprint="another"))
    (reply,) = (await read(stream)).values()
    assert isinstance(reply.error, NotFoundError)


@with_served
async def test_an_engine_without_adapters_says_so(served):
    target = served.target
    with pytest.raises(InvalidRequestError, match="has no adapters"):
        await Target.load_adapter(target, "a", "x", replace=False)
    with pytest.raises(NotFoundError, match="no adapter 'a'"):
        await Target.unload_adapter(target, "a")
