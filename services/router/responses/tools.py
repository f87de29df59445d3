"""Converts the tools of a request for a response to those of a chat.

A custom tool takes text. For the model it is a function with one string parameter. Tools of other types are run by
OpenAI's servers, or only models that were trained for them can call them: they are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.errors import InvalidRequestError
from services.router.errors import excerpt, warn_of
from services.router.output.tools import INPUT_PARAMETER


def to_chat_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns the functions and custom tools among `tools`, as functions; the chat checks them.

    The log has one warning that lists the kinds that are left out. Raises InvalidRequestError.
    """
    functions = []
    left_out: set[str] = set()
    for index, tool in enumerate(tools):
        match tool:
            case {"type": "function"}:
                functions.append({name: value for name, value in tool.items() if name != "type"})
            case {"type": "custom"}:
                functions.append(_function_of(tool))
            case {"type": str(kind)}:
                left_out.add(kind)
            case _:
                raise InvalidRequestError(
                    f"tools[{index}] should be an object with a type (got {excerpt(tool)})", param="tools"
                )
    warn_of(sorted(left_out), "left out the tools of unsupported types:")
    return [{"type": "function", "function": function} for function in functions]


def to_chat_tool_choice(choice: str | dict[str, Any]) -> object:
    match choice:
        case {"type": "function" | "custom", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
    return choice


def custom_tool_names(tools: Sequence[Any]) -> frozenset[str]:
    """Returns the names of the custom tools among `tools`, which are checked."""
    return frozenset(tool["name"] for tool in tools if tool["type"] == "custom")


def _function_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the function that a custom tool is for the model; the description of its parameter has the grammar."""
    parameter = {"type": "string"}
    match tool.get("format"):
        case {"type": "grammar", "syntax": str(syntax), "definition": str(definition)}:
            parameter["description"] = f"Text in this {syntax} grammar:\n{definition}"
    parameters = {"type": "object", "properties": {INPUT_PARAMETER: parameter}, "required": [INPUT_PARAMETER]}
    return {"name": tool.get("name"), "description": tool.get("description"), "parameters": parameters}
