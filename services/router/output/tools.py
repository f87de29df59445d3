"""The tools of a request: definitions, the tool choice, and the grammar that enforces it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cluster.constraints import Grammar
from cluster.errors import InvalidRequestError
from services.router.errors import excerpt
from services.router.structured.grammar import enforceable_schema, schema_text

MAX_TOOLS = 128
MAX_DESCRIPTION_CHARACTERS = 65_536
MAX_SCHEMA_CHARACTERS = 65_536
MAX_SCHEMA_DEPTH = 32

NO_PARAMETERS = {"type": "object", "additionalProperties": False}
INPUT_PARAMETER = "input"
"The only parameter, a string, of the function that represents a custom tool for the model."

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")

Schema = Mapping[str, Any]


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Schema  # JSON schema of an object
    definition: Mapping[str, Any]  # in the form that templates take


@dataclass(frozen=True)
class ToolChoice:
    mode: Literal["auto", "none", "required", "named"]
    name: str = ""  # name of the function, if the choice names one

    @property
    def is_forced(self) -> bool:
        return self.mode in ("required", "named")


def to_tools(value: object) -> tuple[Tool, ...]:
    """Returns a request's `tools`. Raises ValueError or InvalidRequestError if they are invalid."""
    if not isinstance(value, list):
        raise ValueError("should be a list")
    if len(value) > MAX_TOOLS:
        raise ValueError(f"should have at most {MAX_TOOLS} tools, and has {len(value)}")
    tools = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(value))
    names: set[str] = set()
    for tool in tools:
        if tool.name in names:
            raise _refusal("should have tools with different names", tool.name)
        names.add(tool.name)
    return tools


def _tool(value: object, where: str) -> Tool:
    if not isinstance(value, dict):
        raise _refusal(f"{where} should be an object", value)
    if value.get("type") != "function":
        raise _refusal(f'{where}.type should be "function": no other kind of tool is supported', value.get("type"))
    function = value.get("function")
    if not isinstance(function, dict):
        raise _refusal(f"{where}.function should be an object", function)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _refusal(f"{where}.function.name should be 1 to 64 letters, digits, _, - or .", name)
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise _refusal(f"{where}.function.description should be a string", description)
    if description is not None and len(description) > MAX_DESCRIPTION_CHARACTERS:
        raise _refusal(
            f"{where}.function.description should have at most {MAX_DESCRIPTION_CHARACTERS} characters", description
        )
    if not isinstance(function.get("strict"), bool | None):
        raise _refusal(f"{where}.function.strict should be true or false", function["strict"])
    parameters = function.get("parameters")
    if parameters is not None:
        _check_schema(parameters, f"{where}.function.parameters")
    shown = {field: item for field, item in function.items() if field != "strict" and item is not None}
    return Tool(name, NO_PARAMETERS if parameters is None else parameters, {"type": "function", "function": shown})


def _check_schema(schema: object, where: str) -> None:
    """Limits the size and depth of a schema. `tool_grammar` checks whether it can be enforced."""
    if not isinstance(schema, dict):
        raise _refusal(f"{where} should be a JSON schema, which is an object", schema)
    if schema.get("type", "object") != "object":
        raise _refusal(f'{where}.type should be "object": arguments are given by name', schema["type"])
    if _depth(schema) > MAX_SCHEMA_DEPTH:
        raise _refusal(f"{where} should be nested at most {MAX_SCHEMA_DEPTH} deep", schema)
    length = len(json.dumps(schema))
    if length > MAX_SCHEMA_CHARACTERS:
        raise _refusal(f"{where} should have at most {MAX_SCHEMA_CHARACTERS} characters, and has {length}", schema)


def _depth(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(_depth, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(_depth, value), default=0)
    return 0


def to_tool_choice(value: object) -> ToolChoice:
    """Returns a request's `tool_choice`. Raises ValueError if it is invalid."""
    match value:
        case "auto" | "none" | "required":
            return ToolChoice(value)
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice("named", name)
    raise ValueError('should be "auto", "none", "required" or {"type": "function", "function": {"name": ...}}')


def check_choice(choice: ToolChoice, tools: Sequence[Tool]) -> None:
    """Raises InvalidRequestError if `choice` requires a call and `tools` lack the tool for it."""
    if choice.is_forced and not tools:
        raise InvalidRequestError(f"tool_choice={excerpt(choice.mode)} needs tools", param="tool_choice")
    if choice.mode == "named" and choice.name not in {tool.name for tool in tools}:
        raise InvalidRequestError(
            f"tool_choice names the function {excerpt(choice.name)}, which is not among the tools",
            param="tool_choice",
        )


def tool_grammar(choice: ToolChoice, tools: Sequence[Tool], *, parallel: bool) -> Grammar | None:
    """Returns the grammar of the whole answer; None unless a call is required.

    If `choice` names a function, the answer consists of its arguments. Otherwise it is a list of objects {"name": ...,
    "parameters": ...}, with exactly one unless `parallel` is set. Raises InvalidRequestError if the parameters of a
    tool that may be called cannot be enforced.
    """
    indices = {tool.name: index for index, tool in enumerate(tools)}
    if choice.mode == "named":
        index = indices[choice.name]
        return Grammar("json_schema", schema_text(_parameters(tools[index], index)))
    if choice.mode != "required":
        return None
    calls = [_call_schema(tool, index) for index, tool in enumerate(tools)]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not parallel:
        schema["maxItems"] = 1
    return Grammar("json_schema", schema_text(schema))


def _parameters(tool: Tool, index: int) -> dict[str, Any]:
    """Returns the enforceable schema of the arguments of `tool`."""
    name = f"tools[{index}].function.parameters"
    return enforceable_schema({"type": "object", **tool.parameters}, name)


def _call_schema(tool: Tool, index: int) -> Schema:
    return call_object({"const": tool.name}, "parameters", _parameters(tool, index))


def call_object(names: Schema, argument_key: str, arguments: Schema) -> dict[str, Any]:
    """Returns the schema of a call {"name": ..., `argument_key`: ...} whose name is one of `names`."""
    return {
        "type": "object",
        "properties": {"name": names, argument_key: arguments},
        "required": ["name", argument_key],
        "additionalProperties": False,
    }


def _refusal(reason: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(f"{reason} (got {excerpt(value)})", param="tools")
