"""From a request that is well-formed to one that this model can serve, in the wire's form."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.errors import InvalidRequestError
from protos.speculation.v1 import target_pb2, types_pb2
from services.router.errors import excerpt
from services.router.protocol import CompletionRequest


def build_generate_request(
    completion: CompletionRequest,
    *,
    request_id: str,
    prompt_token_ids: Sequence[int],
    seed: int,
    description: target_pb2.TargetDescription,
) -> target_pb2.GenerateRequest:
    """What to ask of the target that `description` describes.

    Raises InvalidRequestError naming the field when the request is beyond that target's limits.
    """
    model = description.model
    _check_prompt(prompt_token_ids, model.vocab_size)
    _check_length(len(prompt_token_ids), completion.max_tokens, model.max_model_len)
    request = target_pb2.GenerateRequest(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        sampling=_sampling(completion, model.vocab_size),
        seed=seed,
        max_tokens=completion.max_tokens,
        ignore_eos=completion.ignore_eos,
    )
    if completion.num_speculative_tokens is not None:
        most = description.max_speculative_tokens
        if completion.num_speculative_tokens > most:
            raise InvalidRequestError(
                f"num_speculative_tokens should be at most {most} (got {excerpt(completion.num_speculative_tokens)})",
                param="num_speculative_tokens",
            )
        request.num_speculative_tokens = completion.num_speculative_tokens
    return request


def _check_prompt(prompt_token_ids: Sequence[int], vocab_size: int) -> None:
    if not prompt_token_ids:
        raise InvalidRequestError("prompt has no tokens", param="prompt")
    for token_id in (min(prompt_token_ids), max(prompt_token_ids)):
        _check_token_id(token_id, vocab_size, "prompt")


def _check_length(num_prompt_tokens: int, max_tokens: int, max_model_len: int) -> None:
    if num_prompt_tokens + max_tokens > max_model_len:
        raise InvalidRequestError(
            f"the prompt's {num_prompt_tokens} tokens and max_tokens={excerpt(max_tokens)} are together over "
            f"the model's limit of {max_model_len} tokens",
            param="max_tokens",
        )


def _check_token_id(token_id: int, vocab_size: int, param: str) -> None:
    if not 0 <= token_id < vocab_size:
        raise InvalidRequestError(
            f"{param} has the token ID {excerpt(token_id)}; this model's are 0 to {vocab_size - 1}",
            param=param,
        )


def _sampling(completion: CompletionRequest, vocab_size: int) -> types_pb2.SamplingParams:
    for token_id in completion.logit_bias:
        _check_token_id(token_id, vocab_size, "logit_bias")
    return types_pb2.SamplingParams(
        temperature=completion.temperature,
        top_k=min(completion.top_k, vocab_size),
        top_p=completion.top_p,
        min_p=completion.min_p,
        repetition_penalty=completion.repetition_penalty,
        presence_penalty=completion.presence_penalty,
        frequency_penalty=completion.frequency_penalty,
        logit_bias_token_ids=completion.logit_bias.keys(),
        logit_bias_values=completion.logit_bias.values(),
    )
