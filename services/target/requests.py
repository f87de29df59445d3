"""From a request on the wire to one that the engine can run."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.errors import InvalidRequestError
from cluster.speculation.noise import NoiseKey
from cluster.targets.base import GenerationRequest, Target
from cluster.wire.codec import decode_sampling
from protos.speculation.v1 import target_pb2


def to_engine(
    request: target_pb2.GenerateRequest,
    request_id: str,
    target: Target,
    max_speculative_tokens: int,
    *,
    is_traced: bool = False,
) -> GenerationRequest:
    """Raises InvalidRequestError naming the field."""
    token_ids = list(request.prompt_token_ids)
    num_prompt_tokens = len(token_ids) - request.num_generated_tokens
    if num_prompt_tokens < 1:
        raise InvalidRequestError("the prompt is empty", param="prompt")
    _check_token_ids(token_ids, target.model.vocab_size, "prompt")
    _check_token_ids(request.sampling.logit_bias_token_ids, target.model.vocab_size, "logit_bias")
    if request.max_tokens <= request.num_generated_tokens:
        raise InvalidRequestError(f"max_tokens {request.max_tokens} leaves nothing to generate", param="max_tokens")
    if num_prompt_tokens + request.max_tokens > target.limits.max_model_len:
        raise InvalidRequestError(
            f"the prompt ({num_prompt_tokens} tokens) and max_tokens {request.max_tokens} exceed the "
            f"model's limit of {target.limits.max_model_len} tokens",
            param="max_tokens",
        )
    k = request.num_speculative_tokens if request.HasField("num_speculative_tokens") else None
    if k is not None and k > max_speculative_tokens:
        raise InvalidRequestError(
            f"num_speculative_tokens {k} exceeds this cluster's limit of {max_speculative_tokens}",
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
        is_traced=is_traced,
    )


def _check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    if max(token_ids, default=0) >= vocab_size:
        raise InvalidRequestError(f"token ID {max(token_ids)} is outside the vocabulary of {vocab_size}", param=param)
