"""Builds the targets' requests from a checked request, within the limits of their model."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.constraints import Grammar
from cluster.errors import ContextLengthError, InvalidRequestError, UnavailableError
from cluster.tokenization import Tokenizer
from protos.speculation.v1 import target_pb2, types_pb2
from services.router.api.request import ApiRequest
from services.router.errors import excerpt
from services.router.targets.affinity import RoutingKey
from services.router.targets.choice_request import ChoiceRequest
from services.router.targets.replicas import AdapterRef, Limits

_VERSION_OF_CONSTRAINTS = 5  # first version of the wire with constraints


def build_choice_requests(
    request: ApiRequest,
    *,
    request_id: str,
    prompts: Sequence[Sequence[int]],
    routing_keys: Sequence[RoutingKey],
    cache_salt: str,
    owner: bytes = b"",
    output_token_ms: float | None = None,
    seed: int,
    limits: Limits,
    tokenizer: Tokenizer,
    grammar: Grammar | None,
    turn_end_ids: frozenset[int] = frozenset(),
    adapter: AdapterRef | None = None,
    may_speculate: bool = True,
) -> list[ChoiceRequest]:
    """Returns the requests to targets: `request.n` choices for each of `prompts` (token IDs).

    `routing_keys` has one for each prompt. `turn_end_ids` end an answer in addition to the model's end tokens.
    Choice j of prompt i has the index `i * request.n + j`, as in the answer; the index makes its noise independent.
    Raises InvalidRequestError naming the field if the request exceeds `limits`, and UnavailableError if it needs a
    newer version of the targets.
    """
    template = target_pb2.GenerateRequest(
        request_id=request_id,
        sampling=_sampling(request, limits.vocab_size),
        seed=seed,
        ignore_eos=request.ignore_eos,
        stop_token_ids=[
            *_checked(request.stop_token_ids, limits.vocab_size, "stop_token_ids"),
            *sorted(turn_end_ids - limits.eos_token_ids),
        ],
        constraints=_constraints(request, grammar, tokenizer, limits.vocab_size),
        num_logprobs=request.num_logprobs,
        num_prompt_logprobs=request.num_prompt_logprobs,
        cache_salt=cache_salt,
        priority=request.priority,
        owner=owner,
        output_token_ms=output_token_ms,
        adapter=adapter.name if adapter is not None else "",
        adapter_fingerprint=adapter.fingerprint if adapter is not None else "",
    )
    _check_version(template, limits.wire_version)
    if request.num_speculative_tokens is not None:
        most = limits.max_speculative_tokens
        if request.num_speculative_tokens > most:
            raise InvalidRequestError(
                f"num_speculative_tokens should be at most {most} (got {excerpt(request.num_speculative_tokens)})",
                param="num_speculative_tokens",
            )
        template.num_speculative_tokens = request.num_speculative_tokens
    if not may_speculate:
        template.num_speculative_tokens = 0
    choices: list[ChoiceRequest] = []
    for prompt_token_ids, key in zip(prompts, routing_keys, strict=True):
        max_tokens = _max_tokens(request, len(prompt_token_ids), limits.max_model_len)
        max_tokens = max(1, max_tokens)  # a request for 0 tokens generates one, which is dropped
        indices = range(len(choices), len(choices) + request.n)
        choices += [ChoiceRequest(template, prompt_token_ids, max_tokens, index, key) for index in indices]
    return choices


def _checked(token_ids: Sequence[int], vocab_size: int, param: str) -> Sequence[int]:
    """Returns `token_ids`. Raises InvalidRequestError unless all are in the vocabulary.

    Checks only the smallest and the largest, since there may be a million.
    """
    for token_id in (min(token_ids), max(token_ids)) if token_ids else ():
        _check_token_id(token_id, vocab_size, param)
    return token_ids


def _constraints(
    request: ApiRequest, grammar: Grammar | None, tokenizer: Tokenizer, vocab_size: int
) -> target_pb2.Constraints | None:
    """Returns the constraints; None if there are none, as workers of older versions need."""
    constraints = target_pb2.Constraints(
        allowed_token_ids=_checked(request.allowed_token_ids or (), vocab_size, "allowed_token_ids"),
        bad_words=[target_pb2.TokenIds(token_ids=word) for word in bad_words(request.bad_words, tokenizer)],
        min_tokens=request.min_tokens,
        grammar=None if grammar is None else target_pb2.Grammar(**{grammar.form: grammar.text}),
    )
    return constraints if constraints.ByteSize() else None


def bad_words(words: Sequence[str], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Returns the tokens of `words`, as in vLLM.

    Each word is encoded as at the beginning of a text and as after a space; equal encodings are listed once.
    """
    spelled = [each for word in words for each in (word.lstrip() or word, " " + word.lstrip())]
    found = dict.fromkeys(map(tuple, tokenizer.encode_all(spelled)))
    return [token_ids for token_ids in found if token_ids]


def _check_version(request: target_pb2.GenerateRequest, version: int) -> None:
    """Raises UnavailableError if `request` has fields that the wire `version` lacks.

    A worker of that version would ignore them and answer a different request.
    """
    if version >= _VERSION_OF_CONSTRAINTS:
        return
    for field in ("constraints", "num_logprobs", "num_prompt_logprobs"):
        if request.HasField(field):
            raise UnavailableError(f"targets of an older version do not support {field}; retry later")
    if request.stop_token_ids or request.cache_salt:
        raise UnavailableError("targets of an older version do not support stop_token_ids or cache_salt; retry later")


def check_prompt(prompt_token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises InvalidRequestError if there are no tokens, or one is not in the vocabulary."""
    if not prompt_token_ids:
        raise InvalidRequestError(f"{param} has no tokens", param=param)
    _checked(prompt_token_ids, vocab_size, param)


def _max_tokens(request: ApiRequest, num_prompt_tokens: int, max_model_len: int) -> int:
    """Returns the maximum number of tokens of a choice.

    Raises ContextLengthError if the prompt leaves no room for a token, or less than the request asks for.
    """
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise ContextLengthError(
            f"This model's maximum context length is {max_model_len} tokens. {request.prompt_field} has "
            f"{num_prompt_tokens}, which leaves none for an answer.",
            param=request.prompt_field,
            num_prompt_tokens=num_prompt_tokens,
            max_model_len=max_model_len,
        )
    field, max_tokens = request.token_limit
    if max_tokens is None:
        return room
    if max_tokens > room:
        raise ContextLengthError(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{num_prompt_tokens + max_tokens} tokens: {num_prompt_tokens} in {request.prompt_field} and "
            f"{field}={excerpt(max_tokens)} for the answer.",
            param=field,
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=max_tokens,
            max_model_len=max_model_len,
        )
    return max_tokens


def _check_token_id(token_id: int, vocab_size: int, param: str) -> None:
    if not 0 <= token_id < vocab_size:
        raise InvalidRequestError(
            f"{param} has the token ID {excerpt(token_id)}; this model's are 0 to {vocab_size - 1}",
            param=param,
        )


def _sampling(request: ApiRequest, vocab_size: int) -> types_pb2.SamplingParams:
    return types_pb2.SamplingParams(
        temperature=request.temperature,
        top_k=min(request.top_k, vocab_size),
        top_p=request.top_p,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias_token_ids=_checked(list(request.logit_bias), vocab_size, "logit_bias"),
        logit_bias_values=request.logit_bias.values(),
    )
