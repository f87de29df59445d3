"""The tools of a request: definitions, the tool choice, and the grammar that enforces it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cluster.constraints import Grammar
from cluster.errors import InvalidRequestError
from services.router.errors import excerpt, warn_of
from services.router.structured.grammar import enforceable_schema, schema_text
from services.router.structured.references import SchemaWork

MAX_DESCRIPTION_CHARACTERS = 65_536
MAX_SCHEMA_CHARACTERS = 65_536
MAX_SCHEMA_DEPTH = 32

NO_PARAMETERS = {"type": "object", "additionalProperties": False}
INPUT_PARAMETER = "input"
"The only parameter, a string, of the function that represents a custom tool for the model."

_NAME = re.compile(r"[a-zA-Z0-9_.:/-]{1,128}")  # OpenAI's and those of MCP

Schema = Mapping[str, Any]


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Schema  # JSON schema of an object
    definition: Mapping[str, Any]  # in the form that templates take
    where: str = "tools"  # its place in the request


@dataclass(frozen=True)
class ToolChoice:
    mode: Literal["auto", "none", "required", "named"]
    name: str = ""  # name of the function, if the choice names one
    allowed: frozenset[str] | None = None  # names of the tools that may be called; None: all

    @property
    def is_forced(self) -> bool:
        return self.mode in ("required", "named")

    def offered(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """Returns those of `tools` that the model is shown and may call."""
        if self.mode == "none":
            return ()
        return tuple(tool for tool in tools if self.allowed is None or tool.name in self.allowed)


def to_tools(value: object) -> tuple[Tool, ...]:
    """Returns the functions among a request's `tools`. Raises ValueError or InvalidRequestError if they are invalid.

    Tools of other types, which a server would have to run, are left out, with one warning.
    """
    if not isinstance(value, list):
        raise ValueError("should be a list")
    tools: dict[str, Tool] = {}
    left_out: set[str] = set()
    for index, given in enumerate(value):
        where = f"tools[{index}]"
        if not isinstance(given, dict):
            raise _refusal(f"{where} should be an object", given)
        kind = given.get("type", "function")
        if not isinstance(kind, str):
            raise _refusal(f"{where}.type should be a string", kind)
        if kind != "function":
            left_out.add(kind)
            continue
        tool = _tool(given, where)
        if tool.name in tools:
            raise _refusal(f"{where}.function.name should differ from the names of the other tools", tool.name)
        tools[tool.name] = tool
    warn_of(sorted(left_out), "left out the tools of unsupported types:")
    return tuple(tools.values())


def _tool(value: Mapping[str, Any], where: str) -> Tool:
    function = value.get("function")
    if not isinstance(function, dict):
        raise _refusal(f"{where}.function should be an object", function)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _refusal(f"{where}.function.name should be 1 to 128 letters, digits and any of _ - . : /", name)
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
    return Tool(
        name, NO_PARAMETERS if parameters is None else parameters, {"type": "function", "function": shown}, where
    )


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
    """Returns a request's `tool_choice`, in any form of OpenAI's APIs.

    Raises ValueError if it is invalid.
    """
    match value:
        case "auto" | "none" | "required" as mode:
            return ToolChoice(mode)
        case {"type": "auto" | "none" | "required" as mode}:
            return ToolChoice(mode)
        case "any" | {"type": "any"}:
            return ToolChoice("required")
        case {"type": "function", "function": {"name": str(name)}} | {"type": "custom", "custom": {"name": str(name)}}:
            return ToolChoice("named", name)
        case {"type": "function" | "custom", "name": str(name)}:
            return ToolChoice("named", name)
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools]}}:
            return _allowed_tools(mode, tools)
        case {"type": "allowed_tools", "mode": mode, "tools": [*tools]}:
            return _allowed_tools(mode, tools)
    raise ValueError(
        'should be "auto", "none", "required", {"type": "function", "function": {"name": ...}}, or {"type": '
        '"allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}'
    )


def _allowed_tools(mode: object, tools: Sequence[object]) -> ToolChoice:
    """Returns the choice among the functions and custom tools of `tools`."""
    if mode != "auto" and mode != "required":
        raise ValueError('should have allowed_tools with the mode "auto" or "required"')
    names = set()
    for tool in tools:
        match tool:
            case {"type": "function", "function": {"name": str(name)}} | {
                "type": "custom",
                "custom": {"name": str(name)},
            }:
                names.add(name)
            case {"type": "function" | "custom", "name": str(name)}:
                names.add(name)
            case {"type": str(kind)} if kind not in ("function", "custom"):
                pass  # of a tool that was left out
            case _:
                raise ValueError("should have allowed_tools whose tools have a type and a name")
    return ToolChoice(mode, allowed=frozenset(names))


def check_choice(choice: ToolChoice, tools: Sequence[Tool]) -> None:
    """Raises InvalidRequestError if `choice` requires a call and `tools` lack the tool for it, or one that it names."""
    if choice.is_forced and not choice.offered(tools):
        raise InvalidRequestError("tool_choice demands a call, and there are no tools for it", param="tool_choice")
    named = (choice.allowed or frozenset()) | ({choice.name} if choice.mode == "named" else set())
    for name in sorted(named - {tool.name for tool in tools}):
        raise InvalidRequestError(
            f"tool_choice names the function {excerpt(name)}, which is not among the tools", param="tool_choice"
        )


def tool_grammar(choice: ToolChoice, tools: Sequence[Tool], *, parallel: bool) -> Grammar | None:
    """Returns the grammar of the whole answer; None unless a call is required.

    If `choice` names a function, the answer consists of its arguments. Otherwise it is a list of objects {"name": ...,
    "parameters": ...}, with exactly one unless `parallel` is set. Raises InvalidRequestError if the parameters of a
    tool that may be called cannot be enforced.
    """
    work = SchemaWork()
    if choice.mode == "named":
        (named,) = (tool for tool in tools if tool.name == choice.name)
        return Grammar("json_schema", schema_text(_parameters(named, work)))
    if choice.mode != "required":
        return None
    calls = [_call_schema(tool, work) for tool in choice.offered(tools)]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not parallel:
        schema["maxItems"] = 1
    return Grammar("json_schema", schema_text(schema))


def _parameters(tool: Tool, work: SchemaWork) -> dict[str, Any]:
    """Returns the enforceable schema of the arguments of `tool`."""
    return enforceable_schema({"type": "object", **tool.parameters}, f"{tool.where}.function.parameters", work)


def _call_schema(tool: Tool, work: SchemaWork) -> Schema:
    return call_object({"const": tool.name}, "parameters", _parameters(tool, work))


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
