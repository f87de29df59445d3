"""The `input` of a request for a response: items, which become the messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.errors import InvalidRequestError
from services.router.errors import excerpt
from services.router.messages import MAX_MESSAGES

_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})

Message = dict[str, Any]


def to_chat_messages(instructions: str | None, value: object) -> list[Message]:
    """What a chat has for `instructions` and `input`. Raises InvalidRequestError naming the item."""
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
    return conversation.messages


class _Conversation:
    """Items of one turn of the assistant, reasoning, text and calls, are one message of it."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._turn: Message | None = None  # the assistant's, while its items come

    def add(self, item: object, where: str) -> None:
        if not isinstance(item, dict):
            raise _refusal(f"{where} should be an object", item)
        kind = item.get("type", "message")
        if kind == "message":
            self._add_message(item, where)
        elif kind == "reasoning":
            self._assistant()["reasoning_content"] = _reasoning(item)
        elif kind == "function_call":
            for field in ("call_id", "name", "arguments"):
                if not isinstance(item.get(field), str):
                    raise _refusal(f"{where}.{field} should be a string", item.get(field))
            call = {"name": item["name"], "arguments": item["arguments"]}
            calls = self._assistant().setdefault("tool_calls", [])
            calls.append({"id": item["call_id"], "type": "function", "function": call})
        elif kind == "function_call_output":
            if not isinstance(item.get("call_id"), str):
                raise _refusal(f"{where}.call_id should be a string", item.get("call_id"))
            content = _content(item.get("output"), f"{where}.output")
            self._turn = None
            self.messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
        elif kind == "item_reference":
            raise _refusal(f"{where} refers to an item, and nothing is stored here: send the item", item.get("id"))
        else:
            raise _refusal(
                f"{where}.type should be message, function_call, function_call_output or reasoning: no other is "
                "supported",
                kind,
            )

    def _add_message(self, item: Mapping[str, Any], where: str) -> None:
        content = _content(item.get("content"), f"{where}.content")
        if item.get("role") != "assistant":
            self._turn = None
            self.messages.append({"role": item.get("role"), "content": content})
            return
        if self._turn is not None and self._turn["content"] is not None:
            self._turn = None  # two texts of it are two messages
        self._assistant()["content"] = content

    def _assistant(self) -> Message:
        if self._turn is None:
            self._turn = {"role": "assistant", "content": None}
            self.messages.append(self._turn)
        return self._turn


def with_content(messages: list[Message]) -> list[Message]:
    """`messages`, where a turn that had nothing but reasoning says nothing."""
    return [
        message | {"content": ""} if message["content"] is None and not message.get("tool_calls") else message
        for message in messages
    ]


def _content(value: object, where: str) -> str | list[dict[str, str]]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _refusal(f"{where} should be a string or a list of text parts", value)
    parts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise _refusal(f"{where}[{index}] should be a part with text: no other is supported", part)
        parts.append({"type": "text", "text": part["text"]})
    return parts or ""


def _reasoning(item: Mapping[str, Any]) -> str:
    """Its text, or else its summary."""
    for field in ("content", "summary"):
        parts = item.get(field)
        if isinstance(parts, list):
            texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
            if texts:
                return "\n".join(texts)
    return ""


def _refusal(reason: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(f"{reason} (got {excerpt(value)})", param="input")
