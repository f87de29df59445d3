"""Converts the items of `input` in a Responses request to the messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.errors import InvalidRequestError
from services.router.chat.messages import MAX_MESSAGES, parts_of
from services.router.errors import excerpt, warn_of

_SYSTEM_ROLES = ("system", "developer")

Message = dict[str, Any]


def to_chat_messages(instructions: str | None, value: object) -> list[Message]:
    """Converts `instructions` and the field `input` (`value`) to the messages of a chat.

    Items of unsupported types, such as calls of tools that OpenAI's servers run, are left out, with one warning in the
    log. Raises InvalidRequestError naming the item.
    """
    conversation = _Conversation()
    if instructions:
        conversation.messages.append({"role": "system", "content": instructions})
    if isinstance(value, str):
        conversation.messages.append({"role": "user", "content": value})
        return conversation.messages
    if not isinstance(value, list) or not value:
        raise _refusal("input should be a string or a list of items", value)
    if len(value) > MAX_MESSAGES:
        raise _refusal(f"input should have at most {MAX_MESSAGES} items, and has {len(value)}", value)
    for index, item in enumerate(value):
        conversation.add(item, f"input[{index}]")
    warn_of(sorted(conversation.left_out), "left out the items of unsupported types:")
    return conversation.messages


class _Conversation:
    """Collects messages; reasoning, text and calls of one assistant turn become one message."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.left_out: set[str] = set()  # types of items that a chat cannot represent
        self._turn: Message | None = None  # the assistant's message while its items are read

    def add(self, item: object, where: str) -> None:
        if not isinstance(item, dict):
            raise _refusal(f"{where} should be an object", item)
        match item.get("type"):
            case None | "message":
                self._add_message(item, where)
            case "reasoning":
                self._assistant()["reasoning_content"] = _reasoning(item)
            case "function_call":
                function = {"name": _string(item, "name", where), "arguments": item.get("arguments")}
                self._add_call(item, where, {"type": "function", "function": function})
            case "custom_tool_call":
                custom = {"name": _string(item, "name", where), "input": item.get("input")}
                self._add_call(item, where, {"type": "custom", "custom": custom})
            case "function_call_output" | "custom_tool_call_output":
                self._add_output(item, where)
            case "item_reference":
                raise _refusal(
                    f"{where} refers to a stored item, and this server stores none: send the item", item.get("id")
                )
            case str(kind):
                self.left_out.add(kind)
            case kind:
                raise _refusal(f"{where}.type should be a string", kind)

    def _add_call(self, item: Mapping[str, Any], where: str, call: Message) -> None:
        calls = self._assistant().setdefault("tool_calls", [])
        calls.append({"id": _string(item, "call_id", where)} | call)

    def _add_output(self, item: Mapping[str, Any], where: str) -> None:
        call_id = _string(item, "call_id", where)
        content = _content(item.get("output"), f"{where}.output")
        self._turn = None
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _add_message(self, item: Mapping[str, Any], where: str) -> None:
        content = _content(item.get("content"), f"{where}.content")
        role = item.get("role")
        if role in _SYSTEM_ROLES and content and len(self.messages) == 1 and self.messages[0]["role"] == "system":
            # Some templates refuse a second system message, and clients send both instructions and such items.
            self.messages[0]["content"] = [*parts_of(self.messages[0]["content"]), *parts_of(content)]
            return
        if role != "assistant":
            self._turn = None
            self.messages.append({"role": "system" if role in _SYSTEM_ROLES else role, "content": content})
            return
        if self._turn is not None and self._turn["content"] is not None:
            self._turn = None  # each further text becomes a message of its own
        self._assistant()["content"] = content

    def _assistant(self) -> Message:
        if self._turn is None:
            self._turn = {"role": "assistant", "content": None}
            self.messages.append(self._turn)
        return self._turn


def _string(item: Mapping[str, Any], field: str, where: str) -> str:
    text = item.get(field)
    if not isinstance(text, str):
        raise _refusal(f"{where}.{field} should be a string", text)
    return text


def _content(value: object, where: str) -> str | list[dict[str, str]] | None:
    """Returns the content of a chat message, with the types of its parts converted."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _refusal(f"{where} should be a string or a list of text parts", value)
    return [_part(part, f"{where}[{index}]") for index, part in enumerate(value)] or ""


def _part(part: object, where: str) -> dict[str, str]:
    match part:
        case {"type": "text" | "input_text" | "output_text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "refusal", "refusal": str(text)}:
            return {"type": "refusal", "refusal": text}
    raise _refusal(f"{where} should be a part with text: no other is supported", part)


def _reasoning(item: Mapping[str, Any]) -> str:
    """Returns the text of a reasoning item, or else of its summary."""
    for field in ("content", "summary"):
        parts = item.get(field)
        if isinstance(parts, list):
            texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
            if texts:
                return "\n".join(texts)
    return ""


def _refusal(reason: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(f"{reason} (got {excerpt(value)})", param="input")
