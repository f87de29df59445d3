"""POST /v1/completions: the request's prompts, the reply's text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

from pydantic import Field, PlainValidator, model_validator

from cluster.errors import InvalidRequestError
from cluster.logprobs import MAX_LOGPROBS, TokenLogprobs
from services.router.api.endpoint import ApiEndpoint
from services.router.api.reply import ChoicesReply
from services.router.api.request import UNSUPPORTED_FIELDS, ApiRequest, TokenCount, Whole
from services.router.output.piece import Piece

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
    # `type`, not `isinstance`: true is not a token ID.
    if isinstance(value, str) or (isinstance(value, list) and all(type(token_id) is int for token_id in value)):
        if not value:
            raise ValueError("is empty")
        return value
    raise ValueError("should be a string, a list of token IDs, or a list of either")


class CompletionRequest(ApiRequest):
    unsupported_fields = UNSUPPORTED_FIELDS | {
        "suffix": (),
        "prompt_embeds": (),
    }
    prompt_field = "prompt"

    prompt: Annotated[
        tuple[str | list[int], ...],
        PlainValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ]
    max_tokens: TokenCount | None = Field(default=16, description="0: processes the prompt without generating")
    logprobs: Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)] | None = None
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
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        if not self.echo or self.logprobs is None:
            return self.prompt_logprobs
        return max(self.logprobs, self.prompt_logprobs or 0)


@dataclass(frozen=True)
class CompletionReply(ChoicesReply):
    id_prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    _text_offsets: dict[int, int] = field(default_factory=dict, init=False)  # length of each choice's text so far

    def _choice(self, index: int, choice: Piece) -> dict[str, Any]:
        value = {
            "index": index,
            "text": choice.text,
            "logprobs": self._logprobs(index, choice),
            "finish_reason": choice.finish_reason,
            **self._stop(choice),
        }
        prompt_logprobs = self._prompt_logprobs(choice)
        if prompt_logprobs is not None:
            value["prompt_logprobs"] = prompt_logprobs
        return self._with_extras(value, choice.token_ids, choice.speculation, choice.rounds)

    def _logprobs(self, index: int, choice: Piece) -> dict[str, Any] | None:
        if self.logprobs is None or choice.logprobs is None:
            return None
        prompt = choice.prompt if self.has_echo else None
        token_ids, scores = choice.token_ids, choice.logprobs
        if prompt is not None:
            token_ids, scores = [*prompt.token_ids, *token_ids], TokenLogprobs(self.num_logprobs)
            if prompt.logprobs is not None:
                scores.extend(prompt.logprobs.part(0, len(prompt.logprobs), self.num_logprobs))
            scores.extend(choice.logprobs)
        value, self._text_offsets[index] = self.logprobs.completion(
            token_ids, scores, has_first=prompt is None, text_offset=self._text_offsets.get(index, 0)
        )
        return value

    def _deltas(self, index: int, piece: Piece, *, is_first: bool) -> Iterator[dict[str, Any]]:
        tells_of_tokens = self.has_token_ids or piece.rounds or (self.logprobs is not None and piece.token_ids)
        if piece.text or piece.finish_reason or tells_of_tokens:
            yield self._choice(index, piece)


class Completions(ApiEndpoint[CompletionRequest]):
    request_type = CompletionRequest
    reply_type = CompletionReply

    def _encode(self, request: CompletionRequest) -> list[list[int]]:
        encode, adds = self._serving.tokenizer.encode, request.add_special_tokens
        if (room := self._serving.room_of(request)) is not None:
            for prompt in request.prompt:
                if isinstance(prompt, str):
                    self._serving.tokenizer.check_fits(prompt, room, "prompt")
        return [
            encode(prompt, add_special_tokens=adds) if isinstance(prompt, str) else prompt for prompt in request.prompt
        ]
