"""The spans of calls on a target, of every way that a call can end."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.engine.limits import StepLimits
from cluster.engine.sequence import FinishReason
from cluster.errors import InternalError
from cluster.speculation.params import SamplingParams
from cluster.targets.base import GenerationOutput, GenerationRequest, Publish, Target, TargetLoad, TargetModel
from cluster.telemetry.tracing import NO_SPAN, Attributes, Span, SpanKind, TraceContext, Tracer
from cluster.wire.codec import encode_sampling
from protos.speculation.v1 import target_pb2
from services.target.router_calls import Calls, RouterStream

SAMPLING = encode_sampling(SamplingParams())
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@dataclass
class KeptSpan(Span):
    """A span that a test can look at."""

    name: str
    parent: TraceContext = field(default_factory=TraceContext)
    start: int | None = None
    attributes: dict[str, Any] = field(default_factory=dict)
    children: list[KeptSpan] = field(default_factory=list)
    error: str | None = None
    ends: list[int | None] = field(default_factory=list)
    is_recorded = True

    def start_child(
        self, name: str, kind: SpanKind = "internal", attributes: Attributes | None = None, at: int | None = None
    ) -> Span:
        self.children.append(KeptSpan(name, start=at, attributes=dict(attributes or {})))
        return self.children[-1]

    def set(self, attributes: Attributes) -> None:
        self.attributes |= attributes

    def fail(self, error_type: str, message: str = "") -> None:
        self.error = error_type

    def end(self, at: int | None = None) -> None:
        self.ends.append(at)


class KeepingTracer(Tracer):
    def __init__(self) -> None:
        self.spans: list[KeptSpan] = []

    def start(self, name: str, kind: SpanKind, parent: TraceContext, attributes: Attributes | None = None) -> Span:
        if parent.traceparent.endswith("-00"):
            return NO_SPAN
        self.spans.append(KeptSpan(name, parent, attributes=dict(attributes or {})))
        return self.spans[-1]


class IdleTarget(Target):
    """Keeps what it is asked for."""

    model = TargetModel("idle", dtype="none", vocab_size=512, eos_token_ids=())
    limits = StepLimits(max_model_len=4096, max_num_seqs=64, max_num_batched_tokens=512)
    is_stuck = False

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []

    def start(self, publish: Publish) -> None: ...

    def stop(self) -> None: ...

    async def run_links(self, endpoints: AsyncIterator[Sequence[str]]) -> None: ...

    def submit(self, request: GenerationRequest) -> None:
        self.requests.append(request)

    def abort(self, request_id: str) -> None: ...

    def load(self) -> TargetLoad:
        return TargetLoad(0, 0, 0, 1, 0)

    def readings(self):
        return ()


class Traced:
    """Calls on a target that does nothing by itself."""

    def __init__(self) -> None:
        self.target, self.tracer = IdleTarget(), KeepingTracer()
        self.calls = Calls(self.target, 8, self.tracer)

    def start(self, stream: RouterStream, call: int = 1, **fields: Any) -> None:
        fields = {"prompt_token_ids": [1, 2, 3], "max_tokens": 50, "traceparent": TRACEPARENT} | fields
        self.calls.start(stream, call, target_pb2.GenerateRequest(request_id="r", sampling=SAMPLING, **fields))

    async def publish(self, *outputs: GenerationOutput) -> None:
        self.calls.publish(outputs)
        await asyncio.sleep(0)

    @property
    def span(self) -> KeptSpan:
        (span,) = self.tracer.spans
        assert span.ends, "it has not ended"
        return span

    def parts(self) -> list[str]:
        """The parts of the call, which follow each other without a gap from its start to its end."""
        parts = self.span.children
        assert all(before.ends == [after.start] for before, after in itertools.pairwise(parts))
        assert all(part.start <= part.ends[0] for part in parts)
        assert parts[-1].ends == self.span.ends
        return [part.name for part in parts]


def output(*token_ids: int, drafts: int = 0, accepted: int = 0, reason: FinishReason | None = None) -> GenerationOutput:
    return GenerationOutput("r#0", token_ids, reason, drafts, accepted)


def test_rounds_are_summed() -> None:
    async def run() -> None:
        traced = Traced()
        with traced.calls.stream() as stream:
            traced.start(stream, traceparent=TRACEPARENT, tracestate="vendor=1", num_generated_tokens=1)
            assert traced.target.requests[0].is_traced
            await traced.publish(GenerationOutput.of_admission("r#0"))
            await traced.publish(output(7))
            await traced.publish(output(8, 9, 10, drafts=4, accepted=2), GenerationOutput.of_admission("r#0"))
            await traced.publish(output(11))
            await traced.publish(output(12, 13, drafts=2, accepted=1, reason=FinishReason.STOP))
            replies = await stream.take()
            assert replies[1].token_ids == list(range(7, 14))
        assert traced.parts() == ["queue", "prefill", "decode"]
        span = traced.span
        assert span.parent == TraceContext(TRACEPARENT, "vendor=1")
        assert span.error is None
        assert span.attributes["gen_ai.response.finish_reasons"] == ["stop"]
        assert span.attributes["gen_ai.usage.input_tokens"] == 2
        assert span.attributes["gen_ai.usage.output_tokens"] == 7
        assert span.attributes["outrider.num_earlier_tokens"] == 1
        assert span.children[1].attributes == {"gen_ai.usage.input_tokens": 3}
        assert span.children[2].attributes == {
            "gen_ai.usage.output_tokens": 7,
            "outrider.num_rounds": 3,
            "outrider.num_drafts": 2,
            "outrider.num_draft_tokens": 6,
            "outrider.num_accepted_tokens": 3,
            "outrider.mean_k": 2.0,
            "outrider.draft_acceptance_rate": 0.5,
        }

    asyncio.run(run())


def test_an_admission_is_no_reply() -> None:
    async def run() -> None:
        traced = Traced()
        with traced.calls.stream() as stream:
            traced.start(stream)
            await traced.publish(GenerationOutput.of_admission("r#0"))
            taking = asyncio.create_task(stream.take())
            await asyncio.sleep(0)
            assert not taking.done()
            await traced.publish(output(7))
            assert (await taking)[1].token_ids == [7]

    asyncio.run(run())


def test_a_call_that_is_cancelled_ends_in_the_part_it_was_in() -> None:
    async def run() -> None:
        parts = ["queue", "prefill", "decode"]
        for num_ended in range(3):
            traced = Traced()
            with traced.calls.stream() as stream:
                traced.start(stream)
                outputs = [GenerationOutput.of_admission("r#0"), output(7)]
                await traced.publish(*outputs[:num_ended])
                traced.calls.cancel(stream, 1)
            assert traced.parts() == parts[: num_ended + 1]
            assert traced.span.error is None
            assert traced.span.attributes["gen_ai.response.finish_reasons"] == ["abort"]

    asyncio.run(run())


def test_a_call_that_fails_says_why() -> None:
    async def run() -> None:
        refused, failed, lost, drained = Traced(), Traced(), Traced(), Traced()
        with refused.calls.stream() as stream:
            refused.start(stream, max_tokens=0)
        with failed.calls.stream() as stream:
            failed.start(stream)
            await failed.publish(GenerationOutput("r#0", (), None, 0, 0, InternalError("broken")))
        with lost.calls.stream() as stream:
            lost.start(stream)
            lost.target.error = ZeroDivisionError()
            await lost.calls.drain(1.0)
        with drained.calls.stream() as stream:
            drained.start(stream)
            await drained.calls.drain(0.0)
        assert refused.span.error == "invalid_request_error"
        assert failed.span.error == "internal_error"
        assert lost.span.error == "internal_error"
        assert drained.span.error == "unavailable_error"
        assert all(len(traced.span.ends) == 1 for traced in (refused, failed, lost, drained))

    asyncio.run(run())


def test_what_its_router_does_not_trace_is_not_traced() -> None:
    async def run() -> None:
        traced = Traced()
        with traced.calls.stream() as stream:
            traced.start(stream, call=1, traceparent="")
            traced.start(stream, call=2, traceparent=TRACEPARENT[:-2] + "00")
        assert traced.tracer.spans == []
        assert not any(request.is_traced for request in traced.target.requests)

    asyncio.run(run())
