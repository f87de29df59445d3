"""Converts `response_format` and vLLM's fields for structured output to one grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from cluster.constraints import Grammar
from cluster.errors import InvalidRequestError
from services.router.errors import excerpt
from services.router.http.json_values import parse_json
from services.router.structured.enforceable import to_enforceable
from services.router.structured.errors import SchemaError
from services.router.structured.references import SchemaWork

MAX_GRAMMAR_CHARACTERS = 65_536
MAX_CHOICES = 1024

_ANY_OBJECT = Grammar("json_schema", '{"type":"object"}')


def enforceable_schema(schema: object, name: str, work: SchemaWork) -> dict[str, Any]:
    """Returns the schema that enforces `schema`, the field `name` of a request. `work`: that of the request's schemas.

    Raises InvalidRequestError naming the path of a keyword that cannot be enforced.
    """
    try:
        return to_enforceable(schema, work)
    except SchemaError as error:
        field = name.partition(".")[0].partition("[")[0]
        raise InvalidRequestError(f"{name}{error.path} {error.reason}", param=field) from error


def schema_text(schema: object) -> str:
    """Returns `schema` as compact JSON."""
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))


def grammar_of(fields: Mapping[str, Any]) -> Grammar | None:
    """Returns the grammar of `response_format`, `structured_outputs` or `guided_*`; at most one may be set.

    Raises InvalidRequestError naming the field.
    """
    asked = {name: grammar for name, grammar in _each(fields) if grammar is not None}
    if len(asked) > 1:
        names = " and ".join(asked)
        raise InvalidRequestError(f"{names} each define the form of the answer: give one", param=list(asked)[1])
    return next(iter(asked.values()), None)


def _each(fields: Mapping[str, Any]) -> list[tuple[str, Grammar | None]]:
    structured, work = fields.get("structured_outputs"), SchemaWork()
    return [
        ("response_format", _response_format(fields.get("response_format"), work)),
        ("structured_outputs", None if structured is None else _structured_outputs(structured, work)),
        *((name, GUIDED[name](name, fields[name], work)) for name in GUIDED if fields.get(name) is not None),
    ]


def _response_format(value: object, work: SchemaWork) -> Grammar | None:
    name = "response_format"
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _refusal(name, "should be an object", value)
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return _ANY_OBJECT
        case "json_schema":
            return _json_schema(f"{name}.json_schema.schema", _described_schema(f"{name}.json_schema", value), work)
        case "structural_tag":
            return _structural_tag(name, dict(value), work)
        case other:
            kinds = "text, json_object, json_schema, structural_tag"
            raise _refusal(f"{name}.type", f"should be one of {kinds}", other)


def _described_schema(name: str, value: Mapping[str, Any]) -> object:
    """Returns the schema in `json_schema.schema`, or where clients write it instead, a level higher or lower."""
    described = value.get("json_schema") if value.get("schema") is None else value
    if not isinstance(described, Mapping):
        raise _refusal(name, "should be an object", described)
    schema = described.get("schema", described.get("json_schema"))
    if schema is not None:
        return schema
    bare = {key: part for key, part in described.items() if key not in ("name", "description", "strict", "schema")}
    return bare or {"type": "object"}


def _structured_outputs(value: object, work: SchemaWork) -> Grammar:
    name = "structured_outputs"
    if not isinstance(value, Mapping):
        raise _refusal(name, "should be an object", value)
    given = {key: kind for key, kind in value.items() if kind not in (None, False)}
    # Options of vLLM's backends. Those that change the constraint are refused; `disable_fallback` has no effect here.
    for key in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
        if given.pop(key, None) is not None:
            raise InvalidRequestError(f"{name}.{key} is not supported; leave it out", param=name)
    given.pop("disable_fallback", None)
    if len(given) != 1 or next(iter(given)) not in _STRUCTURED:
        raise _refusal(name, f"should have one of {', '.join(_STRUCTURED)}", value)
    ((kind, asked),) = given.items()
    return _STRUCTURED[kind](f"{name}.{kind}", asked, work)


def _json_schema(name: str, value: object, work: SchemaWork) -> Grammar:
    """Returns the grammar for a JSON schema; `value`: an object, or its JSON text."""
    if isinstance(value, str):
        value = _parsed(name, value, "should be a schema")
    if not isinstance(value, Mapping):
        raise _refusal(name, "should be a schema", value)
    _check_text(name, schema_text(value))
    text = schema_text(enforceable_schema(value, name, work))
    return Grammar("json_schema", _check_text(name, text))


def _json_object(name: str, value: object, _: SchemaWork) -> Grammar:
    if value is not True:
        raise _refusal(name, "should be true", value)
    return _ANY_OBJECT


def _regex(name: str, value: object, _: SchemaWork) -> Grammar:
    return Grammar("regex", _check_text(name, value))


def _ebnf(name: str, value: object, _: SchemaWork) -> Grammar:
    return Grammar("ebnf", _check_text(name, value))


def _choice(name: str, value: object, _: SchemaWork) -> Grammar:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_CHOICES:
        raise _refusal(name, f"should be a list of 1 to {MAX_CHOICES} strings", value)
    for choice in value:
        if not isinstance(choice, str) or not choice:
            raise _refusal(name, "should have strings that are not empty", choice)
    return Grammar("regex", _check_text(name, "|".join(map(re.escape, value))))


def _structural_tag(name: str, value: object, work: SchemaWork) -> Grammar:
    if isinstance(value, str):
        value = _parsed(name, value, "should be a structural tag")
    return Grammar("structural_tag", _check_text(name, schema_text(_tag_with_enforceable(value, name, work))))


def _tag_with_enforceable(tag: Any, name: str, work: SchemaWork) -> Any:
    """Returns `tag`, the part `name` of a structural tag, with enforceable schemas."""
    if isinstance(tag, list):
        return [_tag_with_enforceable(part, f"{name}[{index}]", work) for index, part in enumerate(tag)]
    if not isinstance(tag, Mapping):
        return tag
    # `schema` in the older form, which has `begin` and `end` next to it.
    is_json = tag.get("type") == "json_schema" and tag.get("style", "json") == "json"
    field = "json_schema" if is_json else "schema" if "begin" in tag else None
    return {
        key: enforceable_schema(part, f"{name}.{key}", work)
        if key == field
        else _tag_with_enforceable(part, f"{name}.{key}", work)
        for key, part in tag.items()
    }


def _parsed(name: str, text: str, reason: str) -> object:
    """Parses `text` as JSON. Raises InvalidRequestError with `reason`."""
    _check_text(name, text)
    try:
        return parse_json(text.encode())
    except ValueError as error:
        raise _refusal(name, reason, text) from error


def _check_text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise _refusal(name, "should be a string that is not empty", value)
    if len(value) > MAX_GRAMMAR_CHARACTERS:
        raise InvalidRequestError(
            f"{name} has {len(value)} characters; a grammar may have {MAX_GRAMMAR_CHARACTERS}",
            param=name.partition(".")[0],
        )
    return value


def _refusal(name: str, reason: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(f"{name} {reason} (got {excerpt(value)})", param=name.partition(".")[0])


_STRUCTURED = {
    "json": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _ebnf,
    "structural_tag": _structural_tag,
}

GUIDED = {
    "guided_json": _json_schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _ebnf,
}
"""vLLM's former names of the fields of `structured_outputs`."""
