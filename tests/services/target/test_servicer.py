"""What the target sends to a caller that reads more slowly than it generates."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import grpc
import pytest

from cluster.config import Config
from cluster.engine.sequence import FinishReason
from cluster.targets.base import GenerationOutput, GenerationRequest, Publish, Target, TargetLoad
from protos.speculation.v1 import target_pb2, target_pb2_grpc
from services.router.targets import Target as RouterTarget
from services.target.servicer import TargetServicer, _next_output


def output(*token_ids: int, drafts: int = 0, accepted: int = 0, reason: FinishReason | None = None) -> GenerationOutput:
    return GenerationOutput("request", token_ids, reason, drafts, accepted)


async def taken(*waiting: GenerationOutput | None) -> GenerationOutput | None:
    """What is taken of `waiting` at once."""
    queue: asyncio.Queue[GenerationOutput | None] = asyncio.Queue()
    for each in waiting:
        queue.put_nowait(each)
    return await _next_output(queue)


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [
        ([output(1)], output(1)),
        ([output(1), output(2), output(3)], [1, 2, 3]),
        ([output(1), output(2, reason=FinishReason.LENGTH)], [1, 2]),
        ([output(1), output(2, 3, drafts=4, accepted=1), output(4)], [1, 2, 3]),
        ([output(1, 2, drafts=4, accepted=1), output(3)], [1, 2]),
    ],
)
def test_outputs_that_wait_go_together_up_to_one_with_drafts(waiting, expected):
    got = asyncio.run(taken(*waiting))
    last = waiting[max(index for index, each in enumerate(waiting) if each.token_ids[-1] == got.token_ids[-1])]
    assert list(got.token_ids) == list(getattr(expected, "token_ids", expected))
    assert (got.finish_reason, got.num_draft_tokens, got.num_accepted_tokens) == (
        last.finish_reason,
        last.num_draft_tokens,
        last.num_accepted_tokens,
    )


def test_the_engines_end_is_not_merged_away():
    assert asyncio.run(taken(output(1), None)) is None


class _BurstTarget(Target):
    """Publishes all tokens of a request at once, and never the last of one that is endless."""

    name, dtype, vocab_size, max_model_len, eos_token_ids = "burst", "none", 512, 4096, ()

    def __init__(self) -> None:
        self.aborted: list[str] = []
        self.is_endless = False

    def start(self, publish: Publish) -> None:
        self._publish = publish

    def submit(self, request: GenerationRequest) -> None:
        last = request.max_tokens - 1
        for place in range(request.max_tokens):
            reason = FinishReason.LENGTH if place == last and not self.is_endless else None
            num_drafts = 4 if self.is_endless else 0  # nothing is merged then
            self._publish([GenerationOutput(request.request_id, [place % 512], reason, num_drafts, 0)])

    def stop(self) -> None: ...

    async def run_links(self, endpoints: AsyncIterator[Sequence[str]]) -> None: ...

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def load(self) -> TargetLoad:
        return TargetLoad(0, 0, 0, 1, 0)

    def readings(self):
        return ()


@contextlib.asynccontextmanager
async def serving(target: _BurstTarget) -> AsyncIterator[RouterTarget]:
    """The router's side of a real call to a servicer."""
    servicer = TargetServicer(target, Config(), "fingerprint")
    target.start(servicer.publish)
    server = grpc.aio.server()
    target_pb2_grpc.add_TargetServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    caller = RouterTarget(f"127.0.0.1:{port}", "fingerprint")
    yield caller
    await caller.close()
    await server.stop(None)


REQUEST = target_pb2.GenerateRequest(request_id="one", prompt_token_ids=[1, 2], max_tokens=2000)


def test_a_router_that_reads_slowly_gets_few_replies_and_every_token():
    async def run() -> list[target_pb2.GenerateReply]:
        replies = []
        async with serving(_BurstTarget()) as caller:
            async for reply in caller.generate(REQUEST):
                replies.append(reply)
                await asyncio.sleep(0.01)
        return replies

    replies = asyncio.run(run())
    assert [token for reply in replies for token in reply.token_ids] == [place % 512 for place in range(2000)]
    assert len(replies) < 20
    assert replies[-1].finish_reason == target_pb2.FINISH_REASON_LENGTH


def test_a_caller_that_leaves_while_replies_wait_to_be_sent_frees_its_sequence():
    async def run(target: _BurstTarget) -> None:
        target.is_endless = True
        async with serving(target) as caller:
            async with contextlib.aclosing(caller.generate(REQUEST)) as replies:
                assert len((await anext(replies)).token_ids) == 1
                await asyncio.sleep(0.1)  # the next ones fill what may be unread
            for _ in range(200):
                if not target.aborted:
                    await asyncio.sleep(0.01)
            assert target.aborted == ["one#0"]

    asyncio.run(run(_BurstTarget()))
