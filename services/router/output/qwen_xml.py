"""Reads Qwen3-Coder's calls: `<function=name><parameter=key>value</parameter></function>`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from services.router.output.source import Reading, Source, Writer
from services.router.output.tool_calls import is_name

PARAMETER, END_OF_PARAMETER, END = "<parameter=", "</parameter>", "</function>"
END_OF_CALL = "</tool_call>"


def read_function(source: Source, writer: Writer, schemas: Mapping[str, Mapping[str, Any]]) -> Reading[bool]:
    """Reads a call after `<function=`. Returns False if the text is not a call.

    `schemas`: JSON schema of the parameters of each function, by name. A call that breaks off keeps the parameters
    that were complete.
    """
    name = yield from _attribute(source)
    if name is None:
        return False
    writer.begin_call(name)
    schema = schemas.get(name, {}).get("properties")
    separator = "{"
    tag = yield from _tag(source, (PARAMETER, END))
    while tag == PARAMETER:
        key = yield from _attribute(source)
        if key is None:
            break
        value: list[str] = []
        # The next tag ends a value too: some models omit the closing tag.
        tag = yield from source.until((END_OF_PARAMETER, PARAMETER, END, END_OF_CALL), value.append)
        if not tag:
            return True  # the output was cut off
        writer.arguments(f"{separator}{_quoted(key)}: {_value(''.join(value), _schema_of(schema, key))}")
        separator = ", "
        if tag == END_OF_PARAMETER:
            tag = yield from _tag(source, (PARAMETER, END))
    if tag is not None:
        writer.arguments("{}" if separator == "{" else "}")
    return True


def _attribute(source: Source) -> Reading[str | None]:
    """Returns the text before `>`; None if it cannot be a name."""
    text = ""
    while (character := (yield from source.read())) not in ("", ">", "<", "\n"):
        text += character
    if character != ">":
        source.unread(character)
        return None
    text = text.strip()
    return text if is_name(text) else None


def _tag(source: Source, tags: tuple[str, ...]) -> Reading[str | None]:
    """Returns which of `tags` comes next; "" if none does, None at the text's end."""
    character = yield from source.skip()
    text = ""
    while character:
        if not any(tag.startswith(text + character) for tag in tags):
            source.unread(text + character)
            return ""
        text += character
        if text in tags:
            return text
        character = yield from source.read()
    return None


def _schema_of(schema: object, key: str) -> Mapping[str, Any]:
    found = schema.get(key) if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _value(text: str, schema: Mapping[str, Any]) -> str:
    """Returns `text` between the tags as JSON.

    It is a string if the schema allows one or `text` is not valid JSON, otherwise the value that `text` spells.
    """
    text = text.removeprefix("\n").removesuffix("\n")
    kinds = schema.get("type")
    if isinstance(kinds, list):
        accepts_text = "string" in kinds and not (text.strip() == "null" and "null" in kinds)
    elif kinds is None:
        accepts_text = not schema.keys() & {"anyOf", "oneOf", "$ref", "enum", "const"}
    else:
        accepts_text = kinds == "string"
    if not accepts_text:
        spelled = text.strip()
        for candidate in (spelled, {"True": "true", "False": "false", "None": "null"}.get(spelled, "")):
            try:
                from_json(candidate, allow_inf_nan=False)
            except ValueError:
                continue
            return candidate
    return _quoted(text)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
