"""The shapes of messages and tools, as `/openapi.json` tells of them; they are checked in `messages` and `tools`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict


class TextPart(TypedDict):
    type: Literal["text"]
    text: str


class CalledFunction(TypedDict):
    name: str
    arguments: Annotated[str, Field(description="a JSON object, written as a string")]


class ToolCall(TypedDict):
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CalledFunction


class ChatMessage(TypedDict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: NotRequired[Annotated[str | list[TextPart] | None, Field(description="null beside `tool_calls` only")]]
    name: NotRequired[str | None]
    tool_calls: NotRequired[Annotated[list[ToolCall] | None, Field(description="of the role `assistant`")]]
    tool_call_id: NotRequired[Annotated[str | None, Field(description="of the role `tool`: the call it answers")]]
    reasoning_content: NotRequired[Annotated[str | None, Field(description="of the role `assistant`")]]
    reasoning: NotRequired[Annotated[str | None, Field(description="another name of `reasoning_content`")]]


class FunctionDefinition(TypedDict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: NotRequired[str | None]
    parameters: NotRequired[Annotated[dict[str, Any] | None, Field(description="a JSON schema of an object")]]
    strict: NotRequired[bool | None]


class ToolDefinition(TypedDict):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(TypedDict):
    name: str


class NamedToolChoice(TypedDict):
    type: Literal["function"]
    function: FunctionName


ToolChoiceField = Literal["auto", "none", "required"] | NamedToolChoice
