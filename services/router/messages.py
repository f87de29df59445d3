"""A chat's messages: checked, and in the form in which chat templates take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.errors import InvalidRequestError
from services.router.errors import excerpt, warn_of_unknown
from services.router.json_values import parse_json

# What a client may call a role, and what chat templates call it.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# Fields of a message. An earlier answer that a client sends back has them too, empty: that is accepted.
_UNSUPPORTED_FIELDS = frozenset({"function_call", "audio", "refusal"})
_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning"})

MAX_MESSAGES = 4096  # or items of a response's input
MAX_PARTS = 1024  # of a message's content
MAX_TOOL_CALLS = 1024  # of a message

Message = dict[str, Any]
Part = dict[str, str]  # {"type": "text", "text": ...}


def to_messages(value: object) -> list[Message]:
    """A request's `messages`, checked, as templates take them. Raises ValueError or InvalidRequestError."""
    if not isinstance(value, list):
        raise ValueError("should be a list")
    if not value:
        raise ValueError("is empty")
    check_number(value, "messages", MAX_MESSAGES)
    unknown = {
        name
        for message in value
        if isinstance(message, dict)
        for name in message.keys() - _FIELDS - _UNSUPPORTED_FIELDS
        if message[name] is not None
    }
    warn_of_unknown(unknown, "fields of messages:")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(value)]


def text_of(content: str | list[Part]) -> str:
    """The text of a message; of several parts, one under the other, as vLLM has it."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _message(value: object, where: str) -> Message:
    if not isinstance(value, dict):
        raise refusal(f"{where} should be an object", value)
    for field in _UNSUPPORTED_FIELDS & value.keys():
        if value[field] not in (None, []):
            raise refusal(f"{where}.{field} is not supported yet", value[field])
    role = value.get("role")
    if role == "function":
        raise refusal(f"{where}.role is not supported: send the results of tools with the role tool", role)
    if not isinstance(role, str) or role not in _ROLES:
        raise refusal(f"{where}.role should be one of {', '.join(_ROLES)}", role)
    message: Message = {"role": _ROLES[role]}
    tool_calls = _tool_calls(value.get("tool_calls"), role, where)
    if tool_calls and value.get("content") is None:
        message["content"] = ""  # and not None, which templates would write down
    else:
        message["content"] = _content(value.get("content"), f"{where}.content")
    if tool_calls:
        message["tool_calls"] = tool_calls
    for field in ("name", "tool_call_id"):
        text = _optional_text(value, field, where)
        if text is not None:
            message[field] = text
    if "tool_call_id" in message and role != "tool":
        raise refusal(f"{where}.tool_call_id belongs into a message of the role tool", message["tool_call_id"])
    reasoning = _optional_text(value, "reasoning_content", where)
    if reasoning is None:
        reasoning = _optional_text(value, "reasoning", where)
    if reasoning is not None and role == "assistant":
        message["reasoning_content"] = message["reasoning"] = reasoning  # templates know it by either name
    return message


def _content(value: object, where: str) -> str | list[Part]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise refusal(f"{where} should be a string or a list of text parts", value)
    check_number(value, where, MAX_PARTS)
    parts: list[Part] = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise refusal(f'{where}[{index}] should be a part of the type "text": no other is supported yet', part)
        if not isinstance(part.get("text"), str):
            raise refusal(f"{where}[{index}].text should be a string", part.get("text"))
        parts.append({"type": "text", "text": part["text"]})
    return parts


def _tool_calls(value: object, role: str, where: str) -> list[dict[str, Any]]:
    where = f"{where}.tool_calls"
    if value in (None, []):
        return []
    if role != "assistant":
        raise refusal(f"{where} belong into a message of the role assistant", value)
    if not isinstance(value, list):
        raise refusal(f"{where} should be a list", value)
    check_number(value, where, MAX_TOOL_CALLS)
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(value)]


def _tool_call(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refusal(f"{where} should be an object", value)
    if value.get("type", "function") != "function":
        raise refusal(f'{where}.type should be "function"', value["type"])
    function = value.get("function")
    if not isinstance(function, dict):
        raise refusal(f"{where}.function should be an object", function)
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise refusal(f"{where}.function.name should be a string", name)
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    call_id = _optional_text(value, "id", where)
    return call if call_id is None else {"id": call_id} | call


def _arguments(value: object, where: str) -> dict[str, Any]:
    """What the API has as a string of JSON, templates write as an object, each in its own way."""
    arguments = value
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        try:
            arguments = parse_json(value.encode())
        except ValueError:
            arguments = None
    if not isinstance(arguments, dict):
        raise refusal(f"{where} should be a JSON object, written as a string", value)
    return arguments


def _optional_text(value: Mapping[str, Any], field: str, where: str) -> str | None:
    text = value.get(field)
    if text is not None and not isinstance(text, str):
        raise refusal(f"{where}.{field} should be a string", text)
    return text


def check_number(values: list[Any], where: str, most: int) -> None:
    if len(values) > most:
        raise refusal(f"{where} should have at most {most} entries, and has {len(values)}", values)


def refusal(reason: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(f"{reason} (got {excerpt(value)})", param="messages")
