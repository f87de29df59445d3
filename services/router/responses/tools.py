"""Converts the tools of a Responses request to those of a chat.

A custom tool takes text. For the model it is a function with one string parameter. The tools of a namespace, such as an
MCP server's, have its name before theirs. Tools of other types are left out: OpenAI's servers run them, or only models
that were trained for them can call them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    for where, namespace, tool in _in_namespaces(tools):
        match tool:
            case {"type": "function"}:
                function = {name: value for name, value in tool.items() if name != "type"}
            case {"type": "custom"}:
                function = _function_of(tool)
            case {"type": str(kind)}:
                left_out.add(kind)
                continue
            case _:
                raise InvalidRequestError(
                    f"{where} should be an object with a type (got {excerpt(tool)})", param="tools"
                )
        functions.append(function | {"name": name_for_model(function.get("name"), namespace)})
    warn_of(sorted(left_out), "left out the tools of unsupported types:")
    return [{"type": "function", "function": function} for function in functions]


def to_chat_tool_choice(choice: Any) -> Any:
    """Returns `choice` with the names that the model knows in place of those with a namespace."""
    match choice:
        case {"namespace": str(namespace), **others}:
            return {**others, "name": name_for_model(others.get("name"), namespace)}
        case {"type": "allowed_tools", "tools": [*tools], **others}:
            return {**others, "type": "allowed_tools", "tools": [to_chat_tool_choice(tool) for tool in tools]}
    return choice


def name_for_model(name: Any, namespace: str | None) -> Any:
    """Returns the name that the model knows a tool by; an invalid `name` is returned as it is."""
    if namespace is None or not isinstance(name, str):
        return name
    return namespace + ("" if namespace.endswith("_") else ".") + name


@dataclass(frozen=True)
class CallOrigin:
    """How the answer reports calls of a tool."""

    item_type: str
    name: str
    namespace: str | None = None

    @property
    def fields(self) -> dict[str, str]:
        return {"name": self.name} | ({} if self.namespace is None else {"namespace": self.namespace})


def origins_of_calls(tools: Sequence[Any]) -> dict[str, CallOrigin]:
    """Returns the origins of calls by the names that the model knows. `tools` must be valid."""
    types = {"function": "function_call", "custom": "custom_tool_call"}
    return {
        name_for_model(tool["name"], namespace): CallOrigin(types[tool["type"]], tool["name"], namespace)
        for _, namespace, tool in _in_namespaces(tools)
        if tool["type"] in types
    }


def _in_namespaces(tools: Sequence[Any]) -> Iterator[tuple[str, str | None, Any]]:
    """Yields each tool with its place in the request and its namespace."""
    for index, tool in enumerate(tools):
        match tool:
            case {"type": "namespace", "name": str(namespace), "tools": [*inner]}:
                yield from ((f"tools[{index}].tools[{place}]", namespace, one) for place, one in enumerate(inner))
            case _:
                yield f"tools[{index}]", None, tool


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
