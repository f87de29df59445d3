"""Converts the items of `input` in a Responses request to the messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.errors import InvalidRequestError
from services.router.chat.messages import MAX_MESSAGES, TEXT_TYPES, new_message, parts_of, stand_in
from services.router.errors import excerpt, warn_of
from services.router.responses.tools import name_for_model

_SYSTEM_ROLES = ("system", "developer")

Message = dict[str, Any]


def to_chat_messages(instructions: str | None, value: object) -> list[Message]:
    """Converts `instructions` and the field `input` (`value`) to the messages of a chat.

    Items of unsupported types, such as calls of tools that OpenAI's servers run, are left out, and parts get a
    stand-in, with one warning. Raises InvalidRequestError naming the item.
    """
    conversation = _Conversation(new_message([_role(item) for item in value]) if isinstance(value, list) else -1)
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
        conversation.add(item, index)
    warn_of(sorted(conversation.left_out), "left out the items and parts of unsupported types:")
    return conversation.messages


class _Conversation:
    """Collects messages; reasoning, text and calls of one assistant turn become one message.

    `new`: index of the user's message that has no answer yet.
    """

    def __init__(self, new: int) -> None:
        self._new = new
        self.messages: list[Message] = []
        self.left_out: set[str] = set()  # types of items and parts that a chat cannot represent
        self._turn: Message | None = None  # the assistant's message while its items are read

    def add(self, item: object, index: int) -> None:
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise _refusal(f"{where} should be an object", item)
        match item.get("type"):
            case None | "message":
                self._add_message(item, where, is_new=index == self._new)
            case "reasoning":
                self._assistant()["reasoning_content"] = _reasoning(item)
            case "function_call":
                function = {"name": _tool_name(item, where), "arguments": item.get("arguments")}
                self._add_call(item, where, {"type": "function", "function": function})
            case "custom_tool_call":
                custom = {"name": _tool_name(item, where), "input": item.get("input")}
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
        content = self._content(item.get("output"), f"{where}.output", is_new=False)
        self._turn = None
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _add_message(self, item: Mapping[str, Any], where: str, *, is_new: bool) -> None:
        role = item.get("role")
        content = self._content(item.get("content"), f"{where}.content", is_new=is_new)
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

    def _content(self, value: object, where: str, *, is_new: bool) -> str | list[dict[str, str]] | None:
        """Returns the content of a chat message, with the types of its parts converted."""
        if value is None or isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise _refusal(f"{where} should be a string or a list of parts", value)
        return [self._part(part, f"{where}[{index}]", is_new) for index, part in enumerate(value)] or ""

    def _part(self, part: object, where: str, is_new: bool) -> dict[str, str]:
        match part:
            case str(text):
                return {"type": "text", "text": text}
            case {"type": str(kind), "text": str(text)} if kind in TEXT_TYPES:
                return {"type": "text", "text": text}
            case {"type": "refusal", "refusal": str(text)}:
                return {"type": "refusal", "refusal": text}
            case {"type": str(kind)} if kind not in TEXT_TYPES:
                self.left_out.add(kind)
                return stand_in(kind, where, is_new=is_new)
        raise _refusal(f"{where} should be a part with a type, or with text", part)


def _role(item: object) -> object:
    """Returns the role of the message that `item` is a part of."""
    if not isinstance(item, dict) or item.get("type") in (None, "message"):
        return item.get("role") if isinstance(item, dict) else None
    return "assistant" if item.get("type") in ("reasoning", "function_call", "custom_tool_call") else "tool"


def _tool_name(item: Mapping[str, Any], where: str) -> str:
    namespace = None if item.get("namespace") is None else _string(item, "namespace", where)
    return str(name_for_model(_string(item, "name", where), namespace))


def _string(item: Mapping[str, Any], field: str, where: str) -> str:
    text = item.get(field)
    if not isinstance(text, str):
        raise _refusal(f"{where}.{field} should be a string", text)
    return text


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
