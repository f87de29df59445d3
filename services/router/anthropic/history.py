"""Converts `system` and `messages` of a request to the messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.router.chat.messages import (
    MAX_MESSAGES,
    MAX_PARTS,
    Message,
    Part,
    check_number,
    new_message,
    parts_of,
    refusal,
    stand_in,
    text_of,
)
from services.router.errors import warn_of

_ROLES = ("user", "assistant", "system")
# Types of blocks that only one role may have.
_OWNERS = {"tool_result": "user", "tool_use": "assistant", "thinking": "assistant", "redacted_thinking": "assistant"}
# Types of blocks that a text stands for, as the answer depends on them. Other unknown ones are left out.
_MEDIA = frozenset({"image", "document", "container_upload"})
_EMPTY_ERROR = "Error"  # text of a failed tool result that has none


def to_chat_messages(system: object, value: object) -> list[Message]:
    """Returns the messages of the chat. Raises InvalidRequestError naming the message and the block.

    Consecutive messages of one role are merged into one. Blocks of unsupported types, such as calls of tools that
    Anthropic's servers run, are left out, and images and files get a stand-in, with one warning.
    """
    conversation = _Conversation()
    if system is not None:
        conversation.add_system(system)
    if not isinstance(value, list) or not value:
        raise refusal("messages should be a list of messages", value)
    check_number(value, "messages", MAX_MESSAGES)
    new = new_message([message.get("role") if isinstance(message, dict) else None for message in value])
    for index, message in enumerate(value):
        conversation.add(message, f"messages[{index}]", is_new=index == new)
    warn_of(sorted(conversation.left_out), "left out the content blocks of unsupported types:")
    return conversation.messages


def continues(messages: list[Message]) -> bool:
    """Returns whether the last of `messages` is the assistant's text, which the answer then continues."""
    last = messages[-1] if messages else {}
    return (
        last.get("role") == "assistant"
        and not last.get("tool_calls")
        and last["content"] is not None
        and bool(text_of(last["content"]).strip())
    )


class _Conversation:
    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.left_out: set[str] = set()  # types of blocks that a chat cannot represent

    def add_system(self, system: object) -> None:
        if isinstance(system, str):
            parts: str | list[Part] = system
        elif isinstance(system, list):
            check_number(system, "system", MAX_PARTS)
            parts = [_text_part(block, f"system[{index}]") for index, block in enumerate(system)]
        else:
            raise refusal("system should be a string or a list of text blocks", system)
        if parts:
            self._say("system", parts)

    def add(self, message: object, where: str, *, is_new: bool) -> None:
        """`is_new`: it is the user's, and has no answer yet."""
        if not isinstance(message, dict):
            raise refusal(f"{where} should be an object", message)
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES:
            raise refusal(f"{where}.role should be one of {', '.join(_ROLES)}", role)
        if isinstance(content, str):
            self._say(role, content)
        elif isinstance(content, list) and (content or role == "assistant"):
            check_number(content, f"{where}.content", MAX_PARTS)
            has_result = any(isinstance(block, dict) and block.get("type") == "tool_result" for block in content)
            for index, block in enumerate(content):
                self._add_block(role, block, f"{where}.content[{index}]", is_new and not has_result)
        else:
            raise refusal(f"{where}.content should be a string or a list of content blocks", content)

    def _add_block(self, role: str, block: object, where: str, is_new: bool) -> None:
        if not isinstance(block, dict):
            raise refusal(f"{where} should be an object", block)
        kind = block.get("type")
        if not isinstance(kind, str):
            raise refusal(f"{where}.type should be a string", kind)
        owner = _OWNERS.get(kind, role)
        if owner != role:
            raise refusal(f"{where}: a block of the type {kind} belongs in a message of the role {owner}", block)
        match kind:
            case "text":
                self._say(role, [_text_part(block, where)])
            case "thinking":
                self._think(_string(block, "thinking", where))
            case "redacted_thinking":
                pass  # encrypted
            case "tool_use":
                self._add_call(block, where)
            case "tool_result":
                self._add_result(block, where)
            case _:
                if parts := self._other_parts(block, where, is_new=is_new):
                    self._say(role, parts)

    def _think(self, text: str) -> None:
        turn = self._turn("assistant")
        earlier = turn.get("reasoning_content")
        turn["reasoning_content"] = text if earlier is None else f"{earlier}\n{text}"

    def _add_call(self, block: Mapping[str, Any], where: str) -> None:
        arguments = block.get("input")
        if not isinstance(arguments, dict | None):
            raise refusal(f"{where}.input should be an object", arguments)
        function = {"name": _string(block, "name", where), "arguments": arguments or {}}
        call = {"id": _string(block, "id", where), "type": "function", "function": function}
        self._turn("assistant").setdefault("tool_calls", []).append(call)

    def _add_result(self, block: Mapping[str, Any], where: str) -> None:
        call_id = _string(block, "tool_use_id", where)
        content = self._result(block.get("content"), f"{where}.content")
        if not content and block.get("is_error") is True:
            content = _EMPTY_ERROR
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _result(self, content: object, where: str) -> str | list[Part]:
        if content is None or isinstance(content, str):
            return content or ""
        if not isinstance(content, list):
            raise refusal(f"{where} should be a string or a list of content blocks", content)
        check_number(content, where, MAX_PARTS)
        parts = []
        for index, block in enumerate(content):
            if isinstance(block, dict) and isinstance(kind := block.get("type"), str) and kind != "text":
                parts += self._other_parts(block, f"{where}[{index}]", is_new=False)
            else:
                parts.append(_text_part(block, f"{where}[{index}]"))
        return parts

    def _other_parts(self, block: Mapping[str, Any], where: str, *, is_new: bool) -> list[Part]:
        """Returns what is shown of a block that is no text: the text of a document or search result, or a stand-in."""
        kind = str(block["type"])
        source = block.get("source")
        if kind == "search_result":
            return [*_labels(block, "title", "source"), *self._inner_parts(block.get("content"), where)]
        if kind == "document" and isinstance(source, dict) and source.get("type") == "text":
            return [
                *_labels(block, "title", "context"),
                {"type": "text", "text": _string(source, "data", f"{where}.source")},
            ]
        if kind == "document" and isinstance(source, dict) and source.get("type") == "content":
            return [*_labels(block, "title", "context"), *self._inner_parts(source.get("content"), f"{where}.source")]
        if kind == "tool_reference":
            return [{"type": "text", "text": f"The tool {_string(block, 'tool_name', where)} is available."}]
        self.left_out.add(kind)
        return [stand_in(kind, where, is_new=is_new)] if kind in _MEDIA else []

    def _inner_parts(self, content: object, where: str) -> list[Part]:
        if not content:
            raise refusal(f"{where}.content should be a string or a list of content blocks", content)
        return parts_of(self._result(content, f"{where}.content"))

    def _say(self, role: str, content: str | list[Part]) -> None:
        """Adds `content` to the turn of `role`."""
        turn = self._turn(role)
        if turn["content"] is None:
            turn["content"] = content
            return
        if isinstance(turn["content"], str):
            turn["content"] = parts_of(turn["content"])
        turn["content"].extend(parts_of(content))

    def _turn(self, role: str) -> Message:
        """Returns the last message if its role is `role`, else a new one."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": None})
        return self.messages[-1]


def _labels(block: Mapping[str, Any], *fields: str) -> list[Part]:
    """Returns the texts that `block` has in `fields`, such as its title."""
    return [{"type": "text", "text": block[field]} for field in fields if isinstance(block.get(field), str)]


def _text_part(block: object, where: str) -> Part:
    match block:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text}
    raise refusal(f"{where} should be a text block", block)


def _string(block: Mapping[str, Any], field: str, where: str) -> str:
    text = block.get(field)
    if not isinstance(text, str):
        raise refusal(f"{where}.{field} should be a string", text)
    return text
