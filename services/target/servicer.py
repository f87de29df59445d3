"""gRPC `Target`: converts and delegates to the target engine."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc

from cluster.config import Config
from cluster.coordination.codec import decode_sampling
from cluster.engine.sequence import FinishReason
from cluster.errors import InvalidRequestError, UnavailableError
from cluster.speculation.noise import NoiseKey
from cluster.targets.base import GenerationOutput, GenerationRequest, Target
from protos.speculation.v1 import target_pb2, target_pb2_grpc, types_pb2
from services.worker import errors_as_status, new_epoch

if TYPE_CHECKING:
    _Context = grpc.aio.ServicerContext[target_pb2.GenerateRequest, AsyncIterator[target_pb2.GenerateReply]]
    _DescribeContext = grpc.aio.ServicerContext[types_pb2.DescribeRequest, Awaitable[target_pb2.TargetDescription]]

_FINISH_REASONS = {
    None: target_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: target_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: target_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: target_pb2.FINISH_REASON_ABORT,
}


class TargetServicer(target_pb2_grpc.TargetServicer):
    """Every running call has a queue that the engine's outputs are sorted into."""

    def __init__(self, target: Target, config: Config, tokenizer_fingerprint: str) -> None:
        self._target = target
        self._config = config
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._epoch = new_epoch()
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._outputs: dict[str, asyncio.Queue[GenerationOutput | None]] = {}

    def publish(self, outputs: Sequence[GenerationOutput]) -> None:
        """Called from the engine's thread after each step."""
        self._loop.call_soon_threadsafe(self._sort, outputs)

    def _sort(self, outputs: Sequence[GenerationOutput]) -> None:
        for output in outputs:
            queue = self._outputs.get(output.request_id)  # absent: cancelled meanwhile
            if queue is not None:
                queue.put_nowait(output)

    def end_calls(self) -> None:
        """The engine is gone: running calls end with an error that says so."""
        for queue in self._outputs.values():
            queue.put_nowait(None)

    async def Generate(
        self, request: target_pb2.GenerateRequest, context: _Context
    ) -> AsyncIterator[target_pb2.GenerateReply]:
        async with errors_as_status(context):
            # Callers' own names need not be unique.
            request_id = f"{request.request_id}#{next(self._numbers)}"
            queue: asyncio.Queue[GenerationOutput | None] = asyncio.Queue()
            self._outputs[request_id] = queue
            is_finished = False
            try:
                self._target.submit(self._to_engine(request_id, request))
                while not is_finished:
                    output = await _next_output(queue)
                    if output is None:
                        raise UnavailableError("the target's engine stopped")
                    is_finished = output.finish_reason is not None
                    yield _to_reply(output)
            finally:
                del self._outputs[request_id]
                if not is_finished:
                    self._target.abort(request_id)

    async def Describe(
        self, request: types_pb2.DescribeRequest, context: _DescribeContext
    ) -> target_pb2.TargetDescription:
        target, load = self._target, self._target.load()
        return target_pb2.TargetDescription(
            model=types_pb2.ModelDescription(
                name=target.name,
                tokenizer_fingerprint=self._tokenizer_fingerprint,
                vocab_size=target.vocab_size,
                max_model_len=target.max_model_len,
                dtype=target.dtype,
            ),
            load=types_pb2.Load(
                num_running=load.num_running,
                num_waiting=load.num_waiting,
                num_used_blocks=load.num_used_blocks,
                num_blocks=load.num_blocks,
            ),
            epoch=self._epoch,
            num_speculative_tokens=self._config.speculation.num_speculative_tokens,
            max_speculative_tokens=self._max_speculative_tokens,
            num_draft_links=load.num_draft_links,
            num_draft_links_configured=len(self._config.draft.addresses),
            eos_token_ids=target.eos_token_ids,
        )

    @property
    def _max_speculative_tokens(self) -> int:
        return self._config.speculation.max_speculative_tokens

    def _to_engine(self, request_id: str, request: target_pb2.GenerateRequest) -> GenerationRequest:
        """Raises InvalidRequestError naming the field."""
        token_ids = list(request.prompt_token_ids)
        num_prompt_tokens = len(token_ids) - request.num_generated_tokens
        if num_prompt_tokens < 1:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        self._check_token_ids(token_ids, "prompt")
        self._check_token_ids(request.sampling.logit_bias_token_ids, "logit_bias")
        if request.max_tokens <= request.num_generated_tokens:
            raise InvalidRequestError(f"max_tokens {request.max_tokens} leaves nothing to generate", param="max_tokens")
        if num_prompt_tokens + request.max_tokens > self._target.max_model_len:
            raise InvalidRequestError(
                f"the prompt ({num_prompt_tokens} tokens) and max_tokens {request.max_tokens} exceed the "
                f"model's limit of {self._target.max_model_len} tokens",
                param="max_tokens",
            )
        k = request.num_speculative_tokens if request.HasField("num_speculative_tokens") else None
        if k is not None and k > self._max_speculative_tokens:
            raise InvalidRequestError(
                f"num_speculative_tokens {k} exceeds this cluster's limit of {self._max_speculative_tokens}",
                param="num_speculative_tokens",
            )
        return GenerationRequest(
            request_id=request_id,
            token_ids=token_ids,
            num_prompt_tokens=num_prompt_tokens,
            params=decode_sampling(request.sampling),
            noise_key=NoiseKey.derive(request.seed, request.choice_index),
            max_tokens=request.max_tokens,
            ignore_eos=request.ignore_eos,
            num_speculative_tokens=k,
        )

    def _check_token_ids(self, token_ids: Sequence[int], param: str) -> None:
        vocab_size = self._target.vocab_size
        if max(token_ids, default=0) >= vocab_size:
            raise InvalidRequestError(
                f"token ID {max(token_ids)} is outside the vocabulary of {vocab_size}", param=param
            )


async def _next_output(queue: asyncio.Queue[GenerationOutput | None]) -> GenerationOutput | None:
    """The next outputs of `queue` as one, where the caller was too slow to take each by itself.

    A reply counts the drafts of one round, so nothing is added to an output with drafts.
    """
    output = await queue.get()
    while output is not None and output.num_draft_tokens == 0 and not queue.empty():
        following = queue.get_nowait()
        if following is None:
            return None
        output = replace(following, token_ids=[*output.token_ids, *following.token_ids])
    return output


def _to_reply(output: GenerationOutput) -> target_pb2.GenerateReply:
    return target_pb2.GenerateReply(
        token_ids=output.token_ids,
        finish_reason=_FINISH_REASONS[output.finish_reason],
        speculation=target_pb2.SpeculationCounts(
            num_drafts=int(output.num_draft_tokens > 0),
            num_draft_tokens=output.num_draft_tokens,
            num_accepted_tokens=output.num_accepted_tokens,
        ),
    )
