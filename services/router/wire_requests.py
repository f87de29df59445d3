"""Builds what is asked of targets from a checked request, within the limits of the model that they serve."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.errors import InvalidRequestError
from protos.speculation.v1 import target_pb2, types_pb2
from services.router.api_request import ApiRequest
from services.router.errors import ContextLengthError, excerpt
from services.router.replicas import Limits


def build_generate_requests(
    request: ApiRequest,
    *,
    request_id: str,
    prompts: Sequence[Sequence[int]],
    seed: int,
    limits: Limits,
) -> list[target_pb2.GenerateRequest]:
    """What to ask of targets with `limits`: for each of `prompts` (token IDs), each of its `request.n` choices.

    Raises InvalidRequestError naming the field when the request is beyond those limits.
    """
    template = target_pb2.GenerateRequest(
        request_id=request_id,
        sampling=_sampling(request, limits.vocab_size),
        seed=seed,
        ignore_eos=request.ignore_eos,
    )
    if request.num_speculative_tokens is not None:
        most = limits.max_speculative_tokens
        if request.num_speculative_tokens > most:
            raise InvalidRequestError(
                f"num_speculative_tokens should be at most {most} (got {excerpt(request.num_speculative_tokens)})",
                param="num_speculative_tokens",
            )
        template.num_speculative_tokens = request.num_speculative_tokens
    generate_requests: list[target_pb2.GenerateRequest] = []
    for prompt_token_ids in prompts:
        _check_prompt(prompt_token_ids, limits.vocab_size, request.prompt_field)
        max_tokens = _max_tokens(request, len(prompt_token_ids), limits.max_model_len)
        for choice_index in range(request.n):
            generate_request = target_pb2.GenerateRequest(
                prompt_token_ids=prompt_token_ids, max_tokens=max_tokens, choice_index=choice_index
            )
            generate_request.MergeFrom(template)
            generate_requests.append(generate_request)
    return generate_requests


def _check_prompt(prompt_token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    if not prompt_token_ids:
        raise InvalidRequestError(f"{param} has no tokens", param=param)
    for token_id in (min(prompt_token_ids), max(prompt_token_ids)):
        _check_token_id(token_id, vocab_size, param)


def _max_tokens(request: ApiRequest, num_prompt_tokens: int, max_model_len: int) -> int:
    """How many tokens a choice may have. Raises ContextLengthError when there is no room for them."""
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise ContextLengthError(
            f"{request.prompt_field} has {num_prompt_tokens} tokens, which leaves none for an answer within "
            f"the model's limit of {max_model_len} tokens",
            param=request.prompt_field,
        )
    field, max_tokens = request.token_limit
    if max_tokens is None:
        return room
    if max_tokens > room:
        raise ContextLengthError(
            f"the prompt's {num_prompt_tokens} tokens and {field}={excerpt(max_tokens)} are together over "
            f"the model's limit of {max_model_len} tokens",
            param=field,
        )
    return max_tokens


def _check_token_id(token_id: int, vocab_size: int, param: str) -> None:
    if not 0 <= token_id < vocab_size:
        raise InvalidRequestError(
            f"{param} has the token ID {excerpt(token_id)}; this model's are 0 to {vocab_size - 1}",
            param=param,
        )


def _sampling(request: ApiRequest, vocab_size: int) -> types_pb2.SamplingParams:
    for token_id in request.logit_bias:
        _check_token_id(token_id, vocab_size, "logit_bias")
    return types_pb2.SamplingParams(
        temperature=request.temperature,
        top_k=min(request.top_k, vocab_size),
        top_p=request.top_p,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias_token_ids=request.logit_bias.keys(),
        logit_bias_values=request.logit_bias.values(),
    )
