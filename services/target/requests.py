"""Converts a request on the wire into one that the engine can run."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.constraints import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_STOP_TOKENS,
    MAX_TOKEN_COUNT,
    Constraints,
    Grammar,
)
from cluster.errors import ContextLengthError, InvalidRequestError
from cluster.logprobs import MAX_LOGPROBS
from cluster.placement.rendezvous import MAX_KEY_BYTES
from cluster.speculation.noise import NoiseKey
from cluster.targets.base import GenerationRequest, Target
from cluster.wire.codec import decode_sampling
from protos.speculation.v1 import target_pb2

_MAX_STOP_TOKENS = MAX_STOP_TOKENS + 1  # a router adds the token that ends a turn of a chat
_MAX_BAD_WORDS = 2 * MAX_BAD_WORDS  # a router encodes each word with and without a space before it
_MAX_BAD_WORD_TOKENS = 4 * MAX_BAD_WORD_CHARACTERS + 1  # the bytes of the longest word in UTF-8, and the space


def to_engine(
    request: target_pb2.GenerateRequest,
    request_id: str,
    target: Target,
    max_speculative_tokens: int,
    *,
    is_traced: bool = False,
) -> GenerationRequest:
    """Converts `request`. Raises InvalidRequestError naming the field."""
    num_prompt_tokens = len(request.prompt_token_ids) - request.num_generated_tokens
    if num_prompt_tokens < 1:
        raise InvalidRequestError("the prompt is empty", param="prompt")
    _check_length(num_prompt_tokens, request, target.limits.max_model_len)
    token_ids = list(request.prompt_token_ids)
    _check_token_ids(token_ids, target.model.vocab_size, "prompt")
    _check_token_ids(request.sampling.logit_bias_token_ids, target.model.vocab_size, "logit_bias")
    try:
        params = decode_sampling(request.sampling)
    except ValueError as error:
        raise InvalidRequestError(str(error)) from error
    k = request.num_speculative_tokens if request.HasField("num_speculative_tokens") else None
    if k is not None and k > max_speculative_tokens:
        raise InvalidRequestError(
            f"num_speculative_tokens {k} exceeds this cluster's limit of {max_speculative_tokens}",
            param="num_speculative_tokens",
        )
    output_token_ms = request.output_token_ms if request.HasField("output_token_ms") else None
    if output_token_ms is not None and not output_token_ms > 0:
        raise InvalidRequestError(f"output_token_ms {output_token_ms:g} is not positive", param="outrider")
    _check_number(len(request.stop_token_ids), _MAX_STOP_TOKENS, "stop_token_ids")
    _check_token_ids(request.stop_token_ids, target.model.vocab_size, "stop_token_ids")
    for field in ("num_logprobs", "num_prompt_logprobs"):
        if request.HasField(field) and getattr(request, field) > MAX_LOGPROBS:
            raise InvalidRequestError(f"logprobs {getattr(request, field)}: at most {MAX_LOGPROBS} are reported")
    return GenerationRequest(
        request_id=request_id,
        token_ids=token_ids,
        num_prompt_tokens=num_prompt_tokens,
        params=params,
        noise_key=NoiseKey.derive(request.seed, request.choice_index),
        max_tokens=request.max_tokens,
        ignore_eos=request.ignore_eos,
        num_speculative_tokens=k,
        stop_token_ids=frozenset(request.stop_token_ids),
        constraints=_constraints(request.constraints, target.model.vocab_size),
        num_logprobs=request.num_logprobs if request.HasField("num_logprobs") else None,
        num_prompt_logprobs=request.num_prompt_logprobs if request.HasField("num_prompt_logprobs") else None,
        priority=request.priority,
        owner=request.owner[:MAX_KEY_BYTES],
        cache_salt=request.cache_salt,
        adapter=request.adapter,
        adapter_fingerprint=request.adapter_fingerprint,
        conversation=request.conversation[:MAX_KEY_BYTES],
        output_limit=None if output_token_ms is None else output_token_ms / 1e3,
        is_traced=is_traced,
    )


def _check_length(num_prompt_tokens: int, request: target_pb2.GenerateRequest, max_model_len: int) -> None:
    """Checks the length before the tokens are checked, because there may be millions."""
    if request.max_tokens <= request.num_generated_tokens:
        raise InvalidRequestError(f"max_tokens {request.max_tokens} leaves nothing to generate", param="max_tokens")
    if num_prompt_tokens + request.max_tokens > max_model_len:
        raise ContextLengthError(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{num_prompt_tokens + request.max_tokens} tokens: {num_prompt_tokens} in the prompt and "
            f"max_tokens={request.max_tokens} for the answer.",
            param="max_tokens",
        )


def _constraints(constraints: target_pb2.Constraints, vocab_size: int) -> Constraints:
    _check_number(constraints.min_tokens, MAX_TOKEN_COUNT, "min_tokens")
    _check_number(len(constraints.allowed_token_ids), MAX_ALLOWED_TOKENS, "allowed_token_ids")
    _check_number(len(constraints.bad_words), _MAX_BAD_WORDS, "bad_words")
    for word in constraints.bad_words:
        _check_number(len(word.token_ids), _MAX_BAD_WORD_TOKENS, "bad_words")
    bad_words = tuple(tuple(word.token_ids) for word in constraints.bad_words)
    _check_token_ids(constraints.allowed_token_ids, vocab_size, "allowed_token_ids")
    _check_token_ids([token for word in bad_words for token in word], vocab_size, "bad_words")
    if not all(bad_words):
        raise InvalidRequestError("bad_words has an entry without tokens", param="bad_words")
    form = constraints.grammar.WhichOneof("form")
    return Constraints(
        allowed_token_ids=tuple(constraints.allowed_token_ids),
        bad_words=bad_words,
        min_tokens=constraints.min_tokens,
        grammar=None if form is None else Grammar(form, getattr(constraints.grammar, form)),
    )


def _check_number(number: int, most: int, param: str) -> None:
    if number > most:
        raise InvalidRequestError(f"{param}: {number} is over the limit of {most}", param=param)


def _check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    if max(token_ids, default=0) >= vocab_size:
        raise InvalidRequestError(f"token ID {max(token_ids)} is outside the vocabulary of {vocab_size}", param=param)
