"""What the requests of both endpoints have in common: their fields, and how a body becomes a request.

A field of a request is checked strictly: no "0.5" and no true for a number. A field among its
`unsupported_fields` is known but not served yet: anything but its default is refused. Any other field is
ignored with a warning. `null` is the same as leaving a field out.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self, TypeVar

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
from services.router.stop import StopStrings

logger = logging.getLogger(__name__)

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARACTERS = 4096

# Fields of OpenAI or vLLM that are not served yet, with the values that are taken because they ask for nothing.
UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "stop_token_ids": ([],),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "return_tokens_as_token_ids": (False,),
    "priority": (0,),
    "logits_processors": (),
    "kv_transfer_params": (),
    "vllm_xargs": (),
}

# About the caller, not about the answer.
IGNORED_FIELDS = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})


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


def _stop(value: object) -> tuple[str, ...]:
    strings = value if isinstance(value, list) else [value]
    if len(strings) > MAX_STOP_STRINGS:
        raise ValueError(f"should have at most {MAX_STOP_STRINGS} strings")
    for string in strings:
        if not isinstance(string, str):
            raise ValueError("should be a string or a list of strings")
        if not 0 < len(string) <= MAX_STOP_STRING_CHARACTERS:
            raise ValueError(f"should have strings of 1 to {MAX_STOP_STRING_CHARACTERS} characters")
    return tuple(strings)


MaxTokens = Annotated[int, Field(ge=1)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class ApiRequest(BaseModel, abc.ABC):
    """A request whose every field is within bounds that hold for all models; the model's limits are checked later."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True)

    unsupported_fields: ClassVar[Mapping[str, tuple[Any, ...]]]
    prompt_field: ClassVar[str]  # where the text to continue is

    model: str | None = None
    max_tokens: MaxTokens | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stop: Annotated[tuple[str, ...], PlainValidator(_stop)] = ()
    include_stop_str_in_output: bool = False
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
    skip_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = Field(
        default=None,
        description="the last so many tokens of each prompt are kept; -1: as many as leave room for the answer",
    )
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_speculation_stats: bool = False
    num_speculative_tokens: Annotated[Annotated[int, Field(ge=0)] | None, BeforeValidator(_num_speculative_tokens)] = (
        Field(default=None, description='None and "auto": the target decides')
    )

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options is only allowed when stream is true", param="stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """As in vLLM: only beside `include_usage`."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """The field that bounds the tokens of a choice, and its value; None: the rest of the context."""
        return "max_tokens", self.max_tokens

    def truncate(self, token_ids: list[int], max_model_len: int) -> list[int]:
        """What is kept of a prompt's `token_ids`: at -1 what leaves room for the answer within `max_model_len`."""
        kept = self.truncate_prompt_tokens
        if kept is None:
            return token_ids
        if kept == -1:
            kept = max(0, max_model_len - (self.token_limit[1] or 1))
        return token_ids[max(0, len(token_ids) - kept) :]

    @property
    def stop_strings(self) -> StopStrings:
        return StopStrings(self.stop, in_output=self.include_stop_str_in_output)

    @property
    def has_echo(self) -> bool:
        """Whether an answer begins with its prompt."""
        return False

    @property
    @abc.abstractmethod
    def num_characters(self) -> int:
        """Length of the text to tokenise."""


R = TypeVar("R", bound=ApiRequest)


def parse_request(kind: type[R], fields: dict[str, Any]) -> R:
    """The request that `fields` make. Raises InvalidRequestError naming the field."""
    given = {name: value for name, value in fields.items() if value is not None}
    for name in given.keys() - kind.model_fields.keys():
        if name in kind.unsupported_fields:
            _refuse_unless_default(name, given[name], kind.unsupported_fields[name])
        elif name not in IGNORED_FIELDS:
            logger.warning("ignored the unknown field %s of a request", excerpt(name))
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise invalid_request(error) from error


def _refuse_unless_default(name: str, value: object, defaults: tuple[Any, ...]) -> None:
    # Types count: true is not 1.
    if not any(type(value) is type(default) and value == default for default in defaults):
        raise InvalidRequestError(f"{name} is not supported yet; leave it out (got {excerpt(value)})", param=name)


def invalid_request(error: ValidationError) -> InvalidRequestError:
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
