"""Converts a request of Anthropic's Messages API to a chat request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.errors import InvalidRequestError
from services.router.anthropic.history import continues, to_chat_messages
from services.router.anthropic.tools import allows_parallel_calls, to_chat_tool_choice, to_chat_tools
from services.router.api.request import IGNORED_FIELDS, MaxTokens, parse_request
from services.router.chat.endpoint import ChatRequest
from services.router.chat.fields import EXTENSIONS
from services.router.errors import excerpt, invalid_request, warn_of_unknown

# Fields with the same meaning in a chat, which validates them.
PASSED_ON = ("model", "stream", "temperature", "top_p", *EXTENSIONS)

# Fields about the caller, caches or speed: any value is accepted.
_IGNORED = IGNORED_FIELDS | {"cache_control", "inference_geo", "speed"}

_THINKS = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}

# Chat fields, and their names in the Messages API.
_NAMES = {"stop": "stop_sequences", "response_format": "output_config"}


class CountTokensRequest(BaseModel):
    """The fields of a request that determine its prompt."""

    model_config = ConfigDict(strict=True, frozen=True)

    messages: Any = Field(description="a list of messages; each content is a string or a list of blocks")
    system: Any = Field(default=None, description="a string, or a list of text blocks")
    tools: list[Any] = []
    tool_choice: dict[str, Any] = {"type": "auto"}
    thinking: dict[str, Any] = Field(default={}, description="its `type` sets the template's `enable_thinking`")
    output_config: dict[str, Any] = Field(default={}, description="its `format` may be a JSON schema")


class MessagesRequest(CountTokensRequest):
    """The fields of a request except those that the chat takes unchanged."""

    max_tokens: MaxTokens
    stop_sequences: list[str] = []


def to_chat(fields: dict[str, Any], kind: type[CountTokensRequest] = MessagesRequest) -> ChatRequest:
    """Returns the chat request for the body `fields`. Raises InvalidRequestError naming the field."""
    given = {name: value for name, value in fields.items() if value is not None}
    warn_of_unknown(
        given.keys() - MessagesRequest.model_fields.keys() - set(PASSED_ON) - _IGNORED, "fields of a request:"
    )
    if "messages" not in given:
        raise InvalidRequestError("messages is required", param="messages")
    try:
        request = kind.model_validate({name: value for name, value in given.items() if name in kind.model_fields})
    except ValidationError as error:
        raise invalid_request(error) from error
    chat = _chat_fields(request) | {name: given[name] for name in PASSED_ON if name in given}
    try:
        return parse_request(ChatRequest, chat)
    except InvalidRequestError as error:
        raise renamed(error) from error


def _chat_fields(request: CountTokensRequest) -> dict[str, Any]:
    messages = to_chat_messages(request.system, request.messages)
    is_continued = continues(messages)
    fields = {
        "messages": messages,
        "add_generation_prompt": not is_continued,
        "continue_final_message": is_continued,
        "tools": to_chat_tools(request.tools),
        "tool_choice": to_chat_tool_choice(request.tool_choice),
        "parallel_tool_calls": allows_parallel_calls(request.tool_choice),
        "enable_thinking": _enable_thinking(request.thinking),
        "response_format": _response_format(request.output_config),
    }
    if isinstance(request, MessagesRequest):
        fields |= {"max_tokens": request.max_tokens, "stop": request.stop_sequences}
    return fields


def _enable_thinking(thinking: Mapping[str, Any]) -> bool | None:
    """Returns the template variable `enable_thinking`; None if `thinking` is empty.

    A token budget is not enforced. Raises InvalidRequestError if the type is unknown.
    """
    if not thinking:
        return None
    kind = thinking.get("type")
    if not isinstance(kind, str) or kind not in _THINKS:
        raise InvalidRequestError(
            f"thinking.type should be one of {', '.join(_THINKS)} (got {excerpt(kind)})", param="thinking"
        )
    return _THINKS[kind]


def _response_format(config: Mapping[str, Any]) -> object:
    warn_of_unknown(
        {name for name in config.keys() - {"format"} if config[name] is not None}, "fields of output_config:"
    )
    match config.get("format"):
        case None:
            return None
        case {"type": "json_schema", "schema": schema}:
            return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
        case form:
            raise InvalidRequestError(
                f'output_config.format should have the type "json_schema" and a schema (got {excerpt(form)})',
                param="output_config",
            )


def renamed(error: InvalidRequestError) -> InvalidRequestError:
    """Returns `error` with the names of chat fields replaced by those of the Messages API."""
    param, message = error.param or "", error.message
    if param == "tools":
        message = message.replace(".function.parameters", ".input_schema", 1).replace(".function.", ".", 1)
    message = message.replace("response_format.json_schema", "output_config.format", 1)
    name = _NAMES.get(param, param)
    return type(error)(message.replace(param, name, 1) if param else message, param=name or None)
