"""Checks the messages of a chat, and converts them for chat templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.errors import InvalidRequestError
from services.router.errors import excerpt, warn_of, warn_of_unknown
from services.router.http.json_values import TooManyValuesError, parse_json
from services.router.output.tools import INPUT_PARAMETER

# Role names that clients may use, and the names in chat templates.
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",  # OpenAI's name for the result of a `function_call`
}
# Roles whose content may be null, absent or []: an answer may have other fields only, and a tool may return nothing.
_MAY_BE_EMPTY = frozenset({"assistant", "tool", "function"})
# Fields that only messages with the role assistant may have.
_ANSWER_FIELDS = ("tool_calls", "function_call", "refusal", "audio")
_FIELDS = frozenset(
    {"role", "content", "name", "tool_call_id", "reasoning_content", "reasoning", "annotations", *_ANSWER_FIELDS}
)

TEXT_TYPES = ("text", "input_text", "output_text")  # of parts, in any of OpenAI's APIs
_MEDIA = ("image", "audio", "video", "document", "file")  # words in the types of parts that are not text

MAX_MESSAGES = 4096  # maximum messages of a chat, or input items of /v1/responses
MAX_PARTS = 1024  # maximum parts of a message's content
MAX_TOOL_CALLS = 1024  # maximum calls of a message

Message = dict[str, Any]
Part = dict[str, str]  # {"type": "text", "text": ...}


def to_messages(value: object) -> list[Message]:
    """Returns a request's `messages` as templates take them. Raises ValueError or InvalidRequestError.

    Accepts every field that an answer of Outrider, OpenAI or vLLM can have. Content that chat templates have no place
    for becomes text or is left out, with one warning in the log that lists where.
    """
    if not isinstance(value, list):
        raise ValueError("should be a list")
    if not value:
        raise ValueError("is empty")
    check_number(value, "messages", MAX_MESSAGES)
    unknown = {
        name
        for message in value
        if isinstance(message, dict)
        for name in message.keys() - _FIELDS
        if message[name] is not None
    }
    warn_of_unknown(unknown, "fields of messages:")
    roles = [message.get("role") if isinstance(message, dict) else None for message in value]
    history = _History(new_message(roles))
    messages = [history.message(message, index) for index, message in enumerate(value)]
    warn_of(history.adjusted, "shown as text or left out, as chat templates have no place for them:")
    return messages


def new_message(roles: Sequence[object]) -> int:
    """Returns the index of the user's last message if no answer follows it, else -1. `roles`: those of all messages."""
    last = max((index for index, role in enumerate(roles) if role == "user"), default=-1)
    return -1 if "assistant" in roles[last + 1 :] else last


def stand_in(kind: str, where: str, *, is_new: bool) -> Part:
    """Returns a text in place of a part of the type `kind`, which the model cannot read, such as an image.

    Agents send their history and the results of their tools again with every turn: a refusal would end the session.
    Raises InvalidRequestError if the part is new: in the user's last message, without an answer yet.
    """
    if is_new:
        raise refusal(f"{where}.type: the model reads only text, send text in place of this part", kind)
    what = next((word for word in _MEDIA if word in kind), "part")
    return {"type": "text", "text": f"[{what} left out: this model reads only text]"}


def text_of(content: str | list[Part]) -> str:
    """Returns the text of a message; parts are separated by newlines, as in vLLM."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def opening_of(messages: Sequence[Message]) -> str:
    """Returns the text up to the first user message, with which all turns begin."""
    texts = []
    for message in messages:
        texts.append(text_of(message["content"]))
        if message["role"] == "user":
            break
    return "\n".join(texts)


def parts_of(content: str | list[Part]) -> list[Part]:
    """Returns the parts of a message; text is a single part."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class _History:
    """Converts the messages of one request; the one at the index `new` is the user's and has no answer yet."""

    def __init__(self, new: int) -> None:
        self._new = new
        self.adjusted: list[str] = []  # where content became text or was left out, such as "messages[0].audio"

    def message(self, value: object, index: int) -> Message:
        where = f"messages[{index}]"
        if not isinstance(value, dict):
            raise refusal(f"{where} should be an object", value)
        role = value.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise refusal(f"{where}.role should be one of {', '.join(_ROLES)}", role)
        message: Message = {"role": _ROLES[role], "content": self._content(value.get("content"), role, index)}
        for field in ("name", "tool_call_id"):
            text = _optional_text(value, field, where)
            if text is not None:
                message[field] = text
        if "tool_call_id" in message and role != "tool":
            raise refusal(f"{where}.tool_call_id belongs in a message of the role tool", message["tool_call_id"])
        reasoning = _optional_text(value, "reasoning_content", where)
        if reasoning is None:
            reasoning = _optional_text(value, "reasoning", where)
        if role == "assistant":
            if reasoning is not None:
                message["reasoning_content"] = message["reasoning"] = reasoning  # templates use either name
            self._add_answer(message, value, where)
            return message
        for field in _ANSWER_FIELDS:
            if value.get(field) not in (None, []):
                raise refusal(f"{where}.{field} belongs in a message of the role assistant", value[field])
        return message

    def _content(self, value: object, role: str, message: int) -> str | list[Part]:
        where, is_new = f"messages[{message}].content", message == self._new
        if isinstance(value, str):
            return value
        if value in (None, []) and role in _MAY_BE_EMPTY:
            return ""  # not None, which templates would render
        if not isinstance(value, list) or not value:
            raise refusal(f"{where} should be a string or a list of text parts", value)
        check_number(value, where, MAX_PARTS)
        return [self._part(part, role, f"{where}[{index}]", is_new) for index, part in enumerate(value)]

    def _part(self, part: object, role: str, where: str, is_new: bool) -> Part:
        if isinstance(part, str):
            return {"type": "text", "text": part}
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or not isinstance(kind, str):
            raise refusal(f'{where} should be a part with the type "text"', part)
        field = "text" if kind in TEXT_TYPES else kind
        if field != "text":
            self.adjusted.append(where)
        if field != "text" and not (field == "refusal" and role == "assistant"):
            return stand_in(kind, where, is_new=is_new)
        if not isinstance(part.get(field), str):
            raise refusal(f"{where}.{field} should be a string", part.get(field))
        return {"type": "text", "text": part[field]}

    def _add_answer(self, message: Message, value: Mapping[str, Any], where: str) -> None:
        """Copies the fields that only assistant messages have from `value` to `message`."""
        calls = self._tool_calls(value.get("tool_calls"), where)
        function = value.get("function_call")
        if function is not None:
            calls.append(self._function_call(function, f"{where}.function_call"))
        if calls:
            message["tool_calls"] = calls
        refused = _optional_text(value, "refusal", where)
        if refused:
            self.adjusted.append(f"{where}.refusal")
        audio = value.get("audio")
        if not isinstance(audio, dict | None):
            raise refusal(f"{where}.audio should be an object", audio)
        if audio is not None:
            self.adjusted.append(f"{where}.audio")
        transcript = _optional_text(audio or {}, "transcript", f"{where}.audio")
        for text in filter(None, (refused, transcript)):
            message["content"] = _with_text(message["content"], text)

    def _tool_calls(self, value: object, where: str) -> list[dict[str, Any]]:
        where = f"{where}.tool_calls"
        if value is None:
            return []
        if not isinstance(value, list):
            raise refusal(f"{where} should be a list", value)
        check_number(value, where, MAX_TOOL_CALLS)
        return [self._tool_call(call, f"{where}[{index}]") for index, call in enumerate(value)]

    def _tool_call(self, value: object, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise refusal(f"{where} should be an object", value)
        match value.get("type"):
            case None | "function":
                call = self._function_call(value.get("function"), f"{where}.function")
            case "custom":
                call = _custom_call(value.get("custom"), f"{where}.custom")
            case kind:
                raise refusal(f'{where}.type should be "function" or "custom"', kind)
        call_id = _optional_text(value, "id", where)
        return call if call_id is None else {"id": call_id} | call

    def _function_call(self, function: object, where: str) -> dict[str, Any]:
        if not isinstance(function, dict):
            raise refusal(f"{where} should be an object", function)
        arguments = self._arguments(function.get("arguments"), f"{where}.arguments")
        return _call(_name(function, where), arguments)

    def _arguments(self, value: object, where: str) -> dict[str, Any]:
        """Parses a call's arguments, a JSON string in the API, to an object for templates.

        A model may have written other JSON, or been cut off. Such text becomes the object's only field, `arguments`.
        """
        if isinstance(value, dict):
            return value
        if value is None:
            return {}
        if not isinstance(value, str):
            raise refusal(f"{where} should be a string", value)
        if not value.strip():
            return {}
        try:
            arguments = parse_json(value.encode())
        except TooManyValuesError as error:
            raise refusal(f"{where} is too large: {error}", value) from error
        except ValueError:
            arguments = value
        if isinstance(arguments, dict):
            return arguments
        if arguments is None:
            return {}
        self.adjusted.append(where)
        return {"arguments": value}


def _custom_call(custom: object, where: str) -> dict[str, Any]:
    """Converts the call of a custom tool to a function call with one string parameter."""
    if not isinstance(custom, dict):
        raise refusal(f"{where} should be an object", custom)
    return _call(_name(custom, where), {INPUT_PARAMETER: _optional_text(custom, "input", where) or ""})


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _name(called: Mapping[str, Any], where: str) -> str:
    name = called.get("name")
    if not isinstance(name, str) or not name:
        raise refusal(f"{where}.name should be a string", name)
    return name


def _with_text(content: str | list[Part], text: str) -> str | list[Part]:
    """Returns `content` with `text` as its last part."""
    if not content:
        return text
    return [*parts_of(content), *parts_of(text)]


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
