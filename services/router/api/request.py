"""Base of the requests of all endpoints: their fields, and the parsing of bodies.

Types are checked strictly: "0.5" and true are not numbers. Fields in `unsupported_fields` are known but not served
yet, so any value except the default is refused. Unknown fields are ignored with a warning. `null` is the same as
leaving a field out.
"""

from __future__ import annotations

import abc
import functools
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

from cluster.constraints import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_STOP_TOKENS,
    MAX_TOKEN_COUNT,
    Grammar,
)
from cluster.errors import InvalidRequestError
from cluster.logprobs import MAX_LOGPROBS
from cluster.speculation.params import MAX_LOGIT_BIAS
from services.router.errors import excerpt, invalid_request, warn_of_unknown
from services.router.output.stop import StopStrings
from services.router.structured.grammar import GUIDED, grammar_of

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARACTERS = 4096

# Fields of OpenAI or vLLM that are not served yet, with the values that have no effect and are accepted.
UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "logits_processors": (),
}

# Fields that do not change the text here: any value is accepted.
IGNORED_FIELDS = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier"),  # about the caller
        *("prediction", "kv_transfer_params"),  # about speed
        "verbosity",  # chat templates have no place for it
        "audio",  # the form of spoken answers, which `modalities` asks for
    }
)


def _top_k(value: int) -> int:
    return 0 if value == -1 else value


def _whole(value: object) -> object:
    """Returns 20 for 20.0, which languages without whole numbers write."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _depth(value: object) -> object:
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


def _vllm_xargs(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("should be an object")
    warn_of_unknown(value.keys() - {"num_speculative_tokens"}, "arguments of vllm_xargs:")
    return value


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Whole = Annotated[int, BeforeValidator(_whole)]
TokenCount = Annotated[Whole, Field(ge=0, le=MAX_TOKEN_COUNT)]
MaxTokens = Annotated[TokenCount, Field(ge=1)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class OutriderFields(BaseModel):
    """Limits of one request; the service keeps them if it can, and counts whether it did."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid", frozen=True)

    output_token_ms: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="mean milliseconds per output token after the first; None: the key's or the target's"
    )


class ApiRequest(BaseModel, abc.ABC):
    """A request that some model could answer; the served model's limits are checked later."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True)

    unsupported_fields: ClassVar[Mapping[str, tuple[Any, ...]]]
    prompt_field: ClassVar[str]  # name of the field with the prompt

    model: str | None = None
    max_tokens: MaxTokens | None = None
    n: Annotated[Whole, Field(ge=1, le=MAX_CHOICES)] = 1
    stop: Annotated[tuple[str, ...], PlainValidator(_stop, json_schema_input_type=str | list[str])] = ()
    include_stop_str_in_output: bool = False
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[Whole, Field(ge=-1), AfterValidator(_top_k)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    # vLLM accepts any positive value; beyond these bounds logits leave the range of float32.
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: Annotated[
        dict[Annotated[int, BeforeValidator(_logit_bias_token_id)], Annotated[float, Field(ge=-100, le=100)]],
        Field(max_length=MAX_LOGIT_BIAS, fail_fast=True),
    ] = {}
    seed: Annotated[Whole, Field(ge=-(2**63), lt=2**63)] | None = None
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] = []
    min_tokens: TokenCount = 0
    bad_words: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)]],
        Field(max_length=MAX_BAD_WORDS, fail_fast=True),
    ] = []
    allowed_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKENS, fail_fast=True)] | None
    ) = None
    prompt_logprobs: Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    return_tokens_as_token_ids: bool = False
    response_format: Any = Field(default=None, description="text, json_object, json_schema or structural_tag")
    structured_outputs: Any = Field(
        default=None, description="json, json_object, regex, choice, grammar or structural_tag"
    )
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    priority: Annotated[Whole, Field(ge=-(2**31), lt=2**31)] = 0
    request_id: Annotated[str, Field(pattern=r"^[!-~]{1,128}$")] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = Field(
        default=None, description="the conversation's name: its turns go to one target while loads allow it"
    )
    spaces_between_special_tokens: bool = Field(default=True, description="taken, and without effect")
    vllm_xargs: Annotated[dict[str, Any], PlainValidator(_vllm_xargs)] = Field(
        default={}, description="num_speculative_tokens"
    )
    skip_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[Whole, Field(ge=-1, le=MAX_TOKEN_COUNT)] | None = Field(
        default=None,
        description="number of tokens that are kept at the end of each prompt; -1: all that leave room for the answer",
    )
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_speculation_stats: bool = False
    return_rounds: bool = False
    num_speculative_tokens: Annotated[Annotated[Whole, Field(ge=0)] | None, BeforeValidator(_depth)] = Field(
        default=None, description='None and "auto": the target decides'
    )

    outrider: OutriderFields = OutriderFields()

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options is only allowed when stream is true", param="stream_options")
        return self

    @model_validator(mode="after")
    def _constraints_can_be_met(self) -> Self:
        _ = self.grammar
        field, most = self.token_limit
        if most is not None and self.min_tokens > most:
            raise InvalidRequestError(
                f"min_tokens={excerpt(self.min_tokens)} is more than {field}={excerpt(most)}", param="min_tokens"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError("prompt_logprobs is not for a streamed answer", param="prompt_logprobs")
        return self

    @functools.cached_property
    def grammar(self) -> Grammar | None:
        """Returns the grammar of the answer's text. Raises InvalidRequestError naming the field."""
        return grammar_of(self.__dict__)

    @property
    def grammar_field(self) -> str:
        """The name of the field that asks for the grammar, if one does."""
        others = ("structured_outputs", *GUIDED)
        return next((name for name in others if getattr(self, name) is not None), "response_format")

    @property
    def num_logprobs(self) -> int | None:
        """Number of likeliest tokens to report per answer token; None: no log-probabilities."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of likeliest tokens to report per prompt token; None: no log-probabilities."""
        return self.prompt_logprobs

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """True if every chunk has the usage; as in vLLM, only together with `include_usage`."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def opening(self) -> str | None:
        """Text that all turns of the conversation begin with; None without messages."""
        return None

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """The field that bounds the tokens of a choice, and its value; None: the rest of the context."""
        return "max_tokens", self.max_tokens

    def truncate(self, token_ids: list[int], max_model_len: int) -> list[int]:
        """Returns the last `truncate_prompt_tokens` tokens of a prompt; all if it is None.

        The value -1 keeps the tokens that leave room for the answer within `max_model_len`. Raises InvalidRequestError
        if it keeps none.
        """
        kept = self.truncate_prompt_tokens
        if kept is None:
            return token_ids
        if kept == -1:
            kept = max_model_len - (self.token_limit[1] or 1)
        if kept < 1:
            raise InvalidRequestError("truncate_prompt_tokens leaves no prompt", param="truncate_prompt_tokens")
        return token_ids[max(0, len(token_ids) - kept) :]

    @property
    def stop_strings(self) -> StopStrings:
        return StopStrings(self.stop, in_output=self.include_stop_str_in_output)

    @property
    def has_echo(self) -> bool:
        """True if an answer begins with its prompt."""
        return False


R = TypeVar("R", bound=ApiRequest)


def parse_request(kind: type[R], fields: dict[str, Any]) -> R:
    """Returns the request with `fields`. Raises InvalidRequestError naming the field."""
    given = {name: value for name, value in fields.items() if value is not None}
    others = given.keys() - kind.model_fields.keys()
    for name in others & kind.unsupported_fields.keys():
        _refuse_unless_default(name, given[name], kind.unsupported_fields[name])
    warn_of_unknown(others - kind.unsupported_fields.keys() - IGNORED_FIELDS, "fields of a request:")
    arguments = given.get("vllm_xargs")
    if isinstance(arguments, dict) and "num_speculative_tokens" in arguments:
        given.setdefault("num_speculative_tokens", arguments["num_speculative_tokens"])
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise invalid_request(error) from error


def _refuse_unless_default(name: str, value: object, defaults: tuple[Any, ...]) -> None:
    # Types count: true is not 1.
    if not any(type(value) is type(default) and value == default for default in defaults):
        raise InvalidRequestError(f"{name} is not supported yet; leave it out (got {excerpt(value)})", param=name)
