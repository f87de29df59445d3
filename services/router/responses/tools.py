"""Converts the tools of a Responses request to those of a chat.

A custom tool takes text. For the model it is a function with one string parameter. Tools of other types are left out:
OpenAI's servers run them, or only models that were trained for them can call them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.errors import InvalidRequestError
from services.router.errors import excerpt, warn_of
from services.router.output.tools import INPUT_PARAMETER


def to_chat_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns the functions and custom tools among `tools`, as functions; the chat checks them.

    Other types are left out, with one warning in the log. Raises InvalidRequestError if a tool is not an object with a
    type.
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
    """Returns the names of the custom tools among `tools`, which must be valid."""
    return frozenset(tool["name"] for tool in tools if tool["type"] == "custom")


def _function_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the function that represents a custom tool for the model.

    If the tool has a grammar, the description of the parameter contains it.
    """
    parameter = {"type": "string"}
    match tool.get("format"):
        case {"type": "grammar", "syntax": str(syntax), "definition": str(definition)}:
            parameter["description"] = f"Text in this {syntax} grammar:\n{definition}"
    parameters = {"type": "object", "properties": {INPUT_PARAMETER: parameter}, "required": [INPUT_PARAMETER]}
    return {"name": tool.get("name"), "description": tool.get("description"), "parameters": parameters}
