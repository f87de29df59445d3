"""POST /v1/completions: the request's prompts, the reply's text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Self

from pydantic import PlainValidator, model_validator

from cluster.errors import InvalidRequestError
from services.router.api_request import UNSUPPORTED_FIELDS, ApiRequest, MaxTokens
from services.router.endpoint import Endpoint
from services.router.reply import Piece, Reply

MAX_PROMPTS = 256
MAX_SEQUENCES = 1024


def _prompts(value: object) -> tuple[str | list[int], ...]:
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > MAX_PROMPTS:
            raise ValueError(f"should have at most {MAX_PROMPTS} prompts, and has {len(value)}")
        kind = type(value[0])
        if any(type(prompt) is not kind for prompt in value):
            raise ValueError("should have prompts of one kind, strings or lists of token IDs")
        return tuple(_prompt(prompt) for prompt in value)
    return (_prompt(value),)


def _prompt(value: object) -> str | list[int]:
    # `type` and not `isinstance`: true is no token ID.
    if isinstance(value, str) or (isinstance(value, list) and all(type(token_id) is int for token_id in value)):
        if not value:
            raise ValueError("is empty")
        return value
    raise ValueError("should be a string, a list of token IDs, or a list of either")


class CompletionRequest(ApiRequest):
    unsupported_fields = UNSUPPORTED_FIELDS | {
        "logprobs": (),
        "suffix": (),
        "prompt_embeds": (),
    }
    prompt_field = "prompt"

    prompt: Annotated[tuple[str | list[int], ...], PlainValidator(_prompts)]
    max_tokens: MaxTokens | None = 16
    add_special_tokens: bool = True
    echo: bool = False

    @model_validator(mode="after")
    def _not_too_many_sequences(self) -> Self:
        if len(self.prompt) * self.n > MAX_SEQUENCES:
            raise InvalidRequestError(
                f"n={self.n} choices of {len(self.prompt)} prompts are over the limit of {MAX_SEQUENCES} together",
                param="n",
            )
        return self

    @property
    def has_echo(self) -> bool:
        return self.echo

    @property
    def num_characters(self) -> int:
        return sum(len(prompt) for prompt in self.prompt if isinstance(prompt, str))


class CompletionReply(Reply):
    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def _choice(self, index: int, choice: Piece) -> dict[str, Any]:
        return self._with_extras(
            {"index": index, "text": choice.text, "logprobs": None, "finish_reason": choice.finish_reason},
            choice.token_ids,
            choice.speculation,
        )

    def _deltas(self, index: int, piece: Piece, *, is_first: bool) -> Iterator[dict[str, Any]]:
        if piece.text or piece.finish_reason or self.has_token_ids:
            yield self._choice(index, piece)


class Completions(Endpoint[CompletionRequest]):
    request_type = CompletionRequest
    reply_type = CompletionReply

    def _encode(self, request: CompletionRequest) -> list[list[int]]:
        encode, adds = self._serving.tokenizer.encode, request.add_special_tokens
        return [
            encode(prompt, add_special_tokens=adds) if isinstance(prompt, str) else prompt for prompt in request.prompt
        ]
