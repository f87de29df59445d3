"""Schemas of messages and tools for `/openapi.json`; the modules `messages` and `tools` validate them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict


class TextPart(TypedDict):
    type: Literal["text"]
    text: str


class RefusalPart(TypedDict):
    type: Literal["refusal"]
    refusal: str


class CalledFunction(TypedDict):
    name: str
    arguments: NotRequired[Annotated[str | None, Field(description="a JSON object, written as a string")]]


class ToolCall(TypedDict):
    id: NotRequired[str | None]
    type: NotRequired[Literal["function"] | None]
    function: CalledFunction


class CalledCustomTool(TypedDict):
    name: str
    input: NotRequired[str | None]


class CustomToolCall(TypedDict):
    id: NotRequired[str | None]
    type: Literal["custom"]
    custom: CalledCustomTool


class ChatMessage(TypedDict):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: NotRequired[
        Annotated[
            str | list[TextPart | RefusalPart] | None,
            Field(description="null and [] only in messages of the roles `assistant`, `tool` and `function`"),
        ]
    ]
    name: NotRequired[str | None]
    tool_calls: NotRequired[
        Annotated[list[ToolCall | CustomToolCall] | None, Field(description="only for the role `assistant`")]
    ]
    function_call: NotRequired[Annotated[CalledFunction | None, Field(description="only for the role `assistant`")]]
    tool_call_id: NotRequired[Annotated[str | None, Field(description="only for the role `tool`: the call it answers")]]
    reasoning_content: NotRequired[Annotated[str | None, Field(description="only for the role `assistant`")]]
    reasoning: NotRequired[Annotated[str | None, Field(description="another name for `reasoning_content`")]]
    refusal: NotRequired[
        Annotated[str | None, Field(description="only for the role `assistant`: shown as its content")]
    ]
    audio: NotRequired[
        Annotated[
            dict[str, Any] | None,
            Field(description="only for the role `assistant`: its `transcript` is shown, the rest is ignored"),
        ]
    ]


class FunctionDefinition(TypedDict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$")]
    description: NotRequired[str | None]
    parameters: NotRequired[Annotated[dict[str, Any] | None, Field(description="JSON schema of an object")]]
    strict: NotRequired[bool | None]


class ToolDefinition(TypedDict):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(TypedDict):
    name: str


class NamedToolChoice(TypedDict):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(TypedDict):
    mode: Literal["auto", "required"]
    tools: list[NamedToolChoice]


class AllowedToolsChoice(TypedDict):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoiceField = Literal["auto", "none", "required"] | NamedToolChoice | AllowedToolsChoice
