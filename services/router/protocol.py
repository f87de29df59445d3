"""The OpenAI completions protocol: a JSON object in, a checked request; pieces of text, JSON objects out.

A field of `CompletionRequest` is checked strictly: no "0.5" and no true for a number. A field in
`UNSUPPORTED_FIELDS` is known but not served yet: anything but its default is refused. Any other field is
ignored with a warning. `null` is the same as leaving a field out.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)

from cluster.errors import InvalidRequestError
from services.router.errors import excerpt

logger = logging.getLogger(__name__)

# Known to OpenAI or vLLM, not served yet: the values that ask for nothing.
UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stop": ([],),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "echo": (False,),
    "logprobs": (),
    "prompt_logprobs": (),
    "suffix": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "return_tokens_as_token_ids": (False,),
    "priority": (0,),
    "logits_processors": (),
    "kv_transfer_params": (),
    "vllm_xargs": (),
}

# About the caller, not about the answer.
IGNORED_FIELDS = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier"})


def _prompt(value: object) -> str | list[int]:
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise ValueError(f"a batch of {len(value)} prompts is not supported yet: send one")
        value = value[0]
    if isinstance(value, str):
        if not value:
            raise ValueError("is empty")
        return value
    # `type` and not `isinstance`: true is no token ID.
    if isinstance(value, list) and all(type(token_id) is int for token_id in value):
        if not value:
            raise ValueError("is empty")
        return value
    raise ValueError("should be a string or a list of token IDs")


def _top_k(value: int) -> int:
    return 0 if value == -1 else value


def _num_speculative_tokens(value: object) -> object:
    return None if value == "auto" else value


def _logit_bias_token_id(value: object) -> int:
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= 10:
        token_id = int(value)
        if str(token_id) == value:  # "01" would name a token twice
            return token_id
    raise ValueError("should have token IDs as keys, written as decimal strings")


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class CompletionRequest(BaseModel):
    """A request whose every field is within its own bounds; the model's limits are checked later."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True)

    prompt: Annotated[str | list[int], PlainValidator(_prompt)]
    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] = 16
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1), AfterValidator(_top_k)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    # vLLM takes any positive one; beyond these bounds logits leave the range of float32.
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: dict[
        Annotated[int, BeforeValidator(_logit_bias_token_id)],
        Annotated[float, Field(ge=-100, le=100)],
    ] = {}
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    num_speculative_tokens: Annotated[Annotated[int, Field(ge=0)] | None, BeforeValidator(_num_speculative_tokens)] = (
        Field(default=None, description='None and "auto": the target decides')
    )

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> CompletionRequest:
        if self.stream_options is not None:
            if not self.stream:
                raise InvalidRequestError("stream_options is only allowed when stream is true", param="stream_options")
            if self.stream_options.continuous_usage_stats:
                raise InvalidRequestError(
                    "stream_options.continuous_usage_stats is not supported yet",
                    param="stream_options.continuous_usage_stats",
                )
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def parse_completion(fields: dict[str, Any]) -> CompletionRequest:
    """The request that `fields` make. Raises InvalidRequestError naming the field."""
    given = {name: value for name, value in fields.items() if value is not None}
    for name in given.keys() - CompletionRequest.model_fields.keys():
        if name in UNSUPPORTED_FIELDS:
            _refuse_unless_default(name, given[name])
        elif name not in IGNORED_FIELDS:
            logger.warning("ignored the unknown field %s of a request", excerpt(name))
    try:
        return CompletionRequest.model_validate(given)
    except ValidationError as error:
        raise _translate(error) from error


def _refuse_unless_default(name: str, value: object) -> None:
    # Types count: true is not 1.
    if not any(type(value) is type(other) and value == other for other in UNSUPPORTED_FIELDS[name]):
        raise InvalidRequestError(f"{name} is not supported yet; leave it out (got {excerpt(value)})", param=name)


def _translate(error: ValidationError) -> InvalidRequestError:
    """The first complaint, with the name of the field it is about."""
    complaint = error.errors(include_url=False)[0]
    location = complaint["loc"]
    param = str(location[0])
    if param == "stream_options" and len(location) > 1:
        param = f"stream_options.{location[1]}"
    if complaint["type"] == "missing":
        return InvalidRequestError(f"{param} is required", param=param)
    reason = complaint["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return InvalidRequestError(f"{param} {reason} (got {excerpt(complaint['input'])})", param=param)


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int

    def to_json(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


@dataclass(frozen=True)
class CompletionReply:
    """What every object of one answer has in common."""

    id: str
    created: int
    model: str
    seed: int
    has_token_ids: bool = False  # choices carry the token IDs of their text

    def whole(self, text: str, token_ids: Sequence[int], finish_reason: str, usage: Usage) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        return self._object([self._choice(text, token_ids, finish_reason)]) | {"usage": usage.to_json()}

    def chunk(
        self, text: str, token_ids: Sequence[int], finish_reason: str | None, include_usage: bool
    ) -> dict[str, Any]:
        """A piece of a streamed answer; its usage, if asked for, comes at the end and is null until then."""
        chunk = self._object([self._choice(text, token_ids, finish_reason)])
        return chunk | {"usage": None} if include_usage else chunk

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last piece of a streamed answer whose usage was asked for."""
        return self._object([]) | {"usage": usage.to_json()}

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "seed": self.seed,
        }

    def _choice(self, text: str, token_ids: Sequence[int], finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
        return choice | {"token_ids": list(token_ids)} if self.has_token_ids else choice
