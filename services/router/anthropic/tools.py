"""Converts `tools` and `tool_choice` of a request to those of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.errors import InvalidRequestError
from services.router.errors import excerpt, warn_of

_MODES = {"auto": "auto", "any": "required", "none": "none"}


def to_chat_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns the tools that the client runs, as functions; the chat request checks them.

    Tools of other types are run by Anthropic's servers, or have schemas that only Anthropic's models know. They are
    left out, with one warning in the log. Raises InvalidRequestError if an entry is not an object or its type is not a
    string.
    """
    functions = []
    left_out: set[str] = set()
    for index, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else tool
        if not isinstance(tool, dict) or not isinstance(kind, str | None):
            raise InvalidRequestError(f"tools[{index}] should be a tool (got {excerpt(tool)})", param="tools")
        if kind in (None, "custom"):
            function = {name: tool.get(name) for name in ("name", "description")}
            functions.append(function | {"parameters": tool.get("input_schema")})
        else:
            left_out.add(kind)
    warn_of(sorted(left_out), "left out the tools of unsupported types:")
    return [{"type": "function", "function": function} for function in functions]


def to_chat_tool_choice(choice: Mapping[str, Any]) -> object:
    """Converts `choice` to a chat's `tool_choice`. Raises InvalidRequestError if it is malformed."""
    kind = choice.get("type")
    if kind == "tool" and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}
    if not isinstance(kind, str) or kind not in _MODES:
        raise InvalidRequestError(
            f'tool_choice should have the type "auto", "any", "none", or "tool" and a name (got {excerpt(choice)})',
            param="tool_choice",
        )
    return _MODES[kind]


def allows_parallel_calls(choice: Mapping[str, Any]) -> bool:
    """Returns whether an answer may have several calls. Raises InvalidRequestError if it is malformed."""
    disabled = choice.get("disable_parallel_tool_use")
    if not isinstance(disabled, bool | None):
        raise InvalidRequestError(
            f"tool_choice.disable_parallel_tool_use should be true or false (got {excerpt(disabled)})",
            param="tool_choice",
        )
    return not disabled
