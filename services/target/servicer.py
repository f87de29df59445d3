"""gRPC `Target`: converts and delegates to the calls in progress and the target engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import TYPE_CHECKING

import grpc

from cluster.config import Config
from cluster.config.types import is_adapter_name
from cluster.errors import InvalidRequestError, UnavailableError
from cluster.speculation.demand import DraftDemand
from cluster.targets.base import Target
from cluster.wire.replies import EPOCH_KEY, encode_replies
from cluster.wire.version import WIRE_VERSION
from protos.speculation.v1 import target_pb2, target_pb2_grpc, types_pb2
from services.target.observation import observe
from services.target.router_calls import Calls, RouterStream
from services.worker import describe_machine, errors_as_status, new_epoch

if TYPE_CHECKING:
    _Context = grpc.aio.ServicerContext[target_pb2.GenerateCommands, target_pb2.GenerateReplies]
    _DescribeContext = grpc.aio.ServicerContext[types_pb2.DescribeRequest, Awaitable[target_pb2.TargetDescription]]
    _ObserveContext = grpc.aio.ServicerContext[target_pb2.ObserveRequest, Awaitable[target_pb2.Observation]]
    _LoadContext = grpc.aio.ServicerContext[target_pb2.LoadAdapterRequest, Awaitable[target_pb2.LoadAdapterReply]]
    _UnloadContext = grpc.aio.ServicerContext[target_pb2.UnloadAdapterRequest, Awaitable[target_pb2.UnloadAdapterReply]]

_STARTS_AT_ONCE = 16  # starts in a row before other tasks run

audit = logging.getLogger("outrider.audit")


class TargetServicer(target_pb2_grpc.TargetServicer):
    def __init__(
        self,
        calls: Calls,
        target: Target,
        config: Config,
        tokenizer_fingerprint: str,
        *,
        traits: Mapping[str, str] | None = None,
        advertised_address: str = "",
        metrics_url: str = "",
    ) -> None:
        """`traits` (None: unknown), `advertised_address` and `metrics_url` describe the worker to other programs."""
        self._calls = calls
        self._target = target
        self._config = config
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._traits = traits
        self._advertised_address = advertised_address
        self._metrics_url = metrics_url
        self._epoch = new_epoch()

    async def GenerateMany(  # type: ignore[override]  # an async generator
        self, request_iterator: AsyncIterator[target_pb2.GenerateCommands], context: _Context
    ) -> AsyncIterator[target_pb2.GenerateReplies]:
        # Sent at once: a router sends nothing before it knows which worker answers.
        try:
            await context.send_initial_metadata(((EPOCH_KEY, str(self._epoch)),))
        except grpc.aio.BaseError as error:  # the peer has gone already, which gRPC would log as our failure
            raise asyncio.CancelledError from error
        async with errors_as_status(context):
            with self._calls.stream() as stream:
                obeying = asyncio.create_task(self._obey(request_iterator, stream))
                obeying.add_done_callback(lambda _: stream.close())
                try:
                    # The next message is made after this one was handed over: later replies are merged into it.
                    while replies := await stream.take():
                        yield encode_replies(replies)
                    if stream.error is not None:
                        raise stream.error
                    if obeying.done():
                        obeying.result()  # raises the error of a bad command
                finally:
                    obeying.cancel()

    async def _obey(self, commands: AsyncIterator[target_pb2.GenerateCommands], stream: RouterStream) -> None:
        async for message in commands:
            for number, start in enumerate(message.start):
                # One message may have a million of them.
                if number % _STARTS_AT_ONCE == _STARTS_AT_ONCE - 1:
                    await asyncio.sleep(0)
                await stream.has_room()
                self._calls.start(stream, start.call, start.request)
            for call in message.cancel:
                self._calls.cancel(stream, call)

    async def Describe(
        self, request: types_pb2.DescribeRequest, context: _DescribeContext
    ) -> target_pb2.TargetDescription:
        target, load, speculation = self._target, self._target.load(), self._config.speculation
        return target_pb2.TargetDescription(
            model=types_pb2.ModelDescription(
                name=target.model.name,
                tokenizer_fingerprint=self._tokenizer_fingerprint,
                vocab_size=target.model.vocab_size,
                max_model_len=target.limits.max_model_len,
                dtype=target.model.dtype,
            ),
            load=types_pb2.Load(
                num_running=load.num_running,
                num_waiting=load.num_waiting,
                num_used_blocks=load.num_used_blocks,
                num_blocks=load.num_blocks,
                num_waiting_tokens=load.num_waiting_tokens,
                draft_demand=_demand(load.demand),
                num_limited=self._calls.limits.num_limited,
                num_late=self._calls.limits.num_late,
            ),
            epoch=self._epoch,
            num_speculative_tokens=speculation.num_speculative_tokens,
            max_speculative_tokens=speculation.max_speculative_tokens,
            num_draft_links=load.num_draft_links,
            num_draft_links_configured=load.num_draft_endpoints,
            eos_token_ids=target.model.eos_token_ids,
            is_draining=self._calls.is_draining,
            is_stuck=target.is_stuck,
            traits=self._traits,
            advertised_address=self._advertised_address,
            wire_version=WIRE_VERSION,
            machine=describe_machine(self._metrics_url),
            adapters=target.adapters,
            block_size=target.block_size,
            caches_prefixes=target.caches_prefixes,
        )

    async def Observe(self, request: target_pb2.ObserveRequest, context: _ObserveContext) -> target_pb2.Observation:
        return observe(self._target, request, self._epoch)

    async def LoadAdapter(
        self, request: target_pb2.LoadAdapterRequest, context: _LoadContext
    ) -> target_pb2.LoadAdapterReply:
        async with errors_as_status(context):
            if not is_adapter_name(request.name):
                raise InvalidRequestError(
                    f"{request.name[:128]!r} is not a valid adapter name: up to 128 letters, digits and ._:@/-"
                )
            if not self._calls.is_draining:
                fingerprint = await self._target.load_adapter(request.name, request.path, replace=request.replace)
                audit.warning("audit: adapter %s loaded from %r: %s", request.name, request.path, fingerprint)
                return target_pb2.LoadAdapterReply(fingerprint=fingerprint)
            raise UnavailableError("the target is shutting down")

    async def UnloadAdapter(
        self, request: target_pb2.UnloadAdapterRequest, context: _UnloadContext
    ) -> target_pb2.UnloadAdapterReply:
        async with errors_as_status(context):
            num_running = await self._target.unload_adapter(request.name)
            audit.warning("audit: adapter %s unloaded; %d requests end with it", request.name, num_running)
            return target_pb2.UnloadAdapterReply(num_running=num_running)


def _demand(demand: DraftDemand | None) -> types_pb2.DraftDemand | None:
    if demand is None:
        return None
    return types_pb2.DraftDemand(num_sequences=demand.num_sequences, goodputs=demand.goodputs)
