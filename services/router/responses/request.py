"""Converts a request of OpenAI's Responses API to a chat request."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, ValidationError

from cluster.errors import InvalidRequestError
from services.router.api.request import IGNORED_FIELDS, MaxTokens, parse_request
from services.router.chat.endpoint import ChatRequest
from services.router.chat.fields import EXTENSIONS
from services.router.errors import excerpt, invalid_request, warn_of_unknown
from services.router.responses.items import to_chat_messages
from services.router.responses.tools import CallOrigin, origins_of_calls, to_chat_tool_choice, to_chat_tools

# Fields with the same meaning in a chat, which validates them.
PASSED_ON = ("model", "stream", "temperature", "top_p", "parallel_tool_calls", "stop", *EXTENSIONS)

# Fields that are refused, with the values that have no effect and are accepted, and the reason.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "previous_response_id": ((), "this server stores nothing: send the earlier items in input"),
    "conversation": ((), "this server stores nothing: send the earlier items in input"),
    "prompt": ((), "this server stores no prompts: send instructions and input"),
    "background": ((False,), "this server stores nothing: wait for the answer, or stream it"),
    "top_logprobs": ((0,), "it is not supported yet"),
    "context_management": (([],), "it is not supported"),
}
# Fields about the caller, or about features that do not exist here.
IGNORED = IGNORED_FIELDS | {
    "max_tool_calls",  # for tools that the server runs
    "stream_options",
    "prompt_cache_retention",
    "prompt_cache_options",
}

# Chat fields, and their names in the Responses API.
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning.effort",
}


class ResponsesRequest(BaseModel):
    """The fields of a request except those that the chat takes unchanged."""

    model_config = ConfigDict(strict=True, frozen=True)

    input: Any = Field(description="a string, or a list of items")
    instructions: str | None = Field(default=None, description="the system message")
    max_output_tokens: MaxTokens | None = None
    tools: list[Any] = []
    tool_choice: str | dict[str, Any] = "auto"
    text: dict[str, Any] = {}
    reasoning: dict[str, Any] = {}
    include: list[str] = []
    metadata: dict[str, str] = {}
    truncation: Literal["auto", "disabled"] = "disabled"


class ResponsesChat(ChatRequest):
    """The chat request that a Responses request is converted to."""

    prompt_field = "input"

    origin: SkipValidation[ResponsesRequest]

    @property
    def token_limit(self) -> tuple[str, int | None]:
        return "max_output_tokens", self.max_completion_tokens

    @property
    def origins_of_calls(self) -> dict[str, CallOrigin]:
        return origins_of_calls(self.origin.tools)


def to_chat(fields: dict[str, Any]) -> ResponsesChat:
    """Returns the chat request for the body `fields`. Raises InvalidRequestError naming the field."""
    given = {name: value for name, value in fields.items() if value is not None}
    others = given.keys() - ResponsesRequest.model_fields.keys() - set(PASSED_ON)
    for name in others & REFUSED.keys():
        harmless, reason = REFUSED[name]
        if not any(type(given[name]) is type(value) and given[name] == value for value in harmless):
            raise InvalidRequestError(f"{name} can't be served: {reason} (got {excerpt(given[name])})", param=name)
    warn_of_unknown(others - REFUSED.keys() - IGNORED, "fields of a request:")
    if "input" not in given:
        raise InvalidRequestError("input is required", param="input")
    try:
        request = ResponsesRequest.model_validate(
            {name: value for name, value in given.items() if name in ResponsesRequest.model_fields}
        )
    except ValidationError as error:
        raise invalid_request(error) from error
    if "message.output_text.logprobs" in request.include:
        raise InvalidRequestError("include: log-probabilities are not supported yet", param="include")
    chat = {name: given[name] for name in PASSED_ON if name in given} | _chat_fields(request)
    try:
        return parse_request(ResponsesChat, chat | {"origin": request})
    except InvalidRequestError as error:
        raise renamed(error) from error


def renamed(error: InvalidRequestError) -> InvalidRequestError:
    """Returns `error` with the chat field's name replaced by that of the Responses API."""
    name = _NAMES.get(error.param or "")
    if name is None:
        return error
    message = error.message.replace("response_format.json_schema", "text.format", 1)
    message = message.replace("response_format", "text.format", 1)
    return type(error)(message.replace(error.param or "", name, 1), param=name.partition(".")[0])


def _chat_fields(request: ResponsesRequest) -> dict[str, Any]:
    return {
        "messages": to_chat_messages(request.instructions, request.input),
        "max_completion_tokens": request.max_output_tokens,
        "tools": to_chat_tools(request.tools),
        "tool_choice": to_chat_tool_choice(request.tool_choice),
        "response_format": _response_format(request.text),
        "reasoning_effort": request.reasoning.get("effort"),
    }


def _response_format(text: dict[str, Any]) -> object:
    form = text.get("format")
    if not isinstance(form, dict):
        if form is None:
            return None
        raise InvalidRequestError(f"text.format should be an object (got {excerpt(form)})", param="text")
    if form.get("type") != "json_schema" or isinstance(form.get("json_schema"), dict):  # the latter as in a chat
        return form
    if "schema" not in form:
        raise InvalidRequestError("text.format.schema is required", param="text")
    return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}
