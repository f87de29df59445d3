"""Analyses the values of a schema: their types, the full list if it is short, and whether two schemas overlap.

Keywords that are malformed are ignored here: they are refused where the schema is translated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from services.router.structured.references import References

TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
_BASIC = frozenset(TYPES) - {"integer"}  # no value has two of them
_MAX_DEPTH = 8


def type_of(value: object) -> str:
    """Returns the type of a JSON value; "number" for integers, too."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def has_type(value: object, types: frozenset[str] | set[str]) -> bool:
    """Returns whether `value` has one of `types`."""
    found = type_of(value)
    return found in types or (
        found == "number"
        and "integer" in types
        and isinstance(value, int | float)
        and math.isfinite(value)
        and value == int(value)
    )


def key_of(value: object) -> str:
    """Returns a text that equal values of JSON, and only those, share: 1 and 1.0 are equal, 1 and true are not."""

    def plain(part: Any) -> Any:
        if isinstance(part, float) and part.is_integer():
            return int(part)
        if isinstance(part, Mapping):
            return {key: plain(item) for key, item in part.items()}
        return [plain(item) for item in part] if isinstance(part, list) else part

    return json.dumps(plain(value), sort_keys=True)


def has_exact_numbers(value: object) -> bool:
    """Returns whether all numbers within `value` are finite, and integers have at most 64 bits."""
    if isinstance(value, Mapping):
        return all(map(has_exact_numbers, value.values()))
    if isinstance(value, list):
        return all(map(has_exact_numbers, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, int) or -(2**63) <= value < 2**63


def finite_values(schema: Any, references: References) -> list[Any] | None:
    """Returns all values of a schema that lists them, or allows booleans and null only; else None."""
    schema = references.resolve(schema)
    if not isinstance(schema, Mapping):
        return None
    types = types_of(schema, references)
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]]
        references.spend(len(values))
        kept = [value for value in values if "const" not in schema or key_of(value) == key_of(schema["const"])]
        return [value for value in kept if has_type(value, types)]
    if types and types <= {"boolean", "null"}:
        return [value for value in (True, False, None) if has_type(value, types)]
    return None


def types_of(schema: Any, references: References, depth: int = 0) -> frozenset[str]:
    """Returns a set of types that includes the type of every value of `schema`."""
    schema = references.resolve(schema)
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return frozenset() if schema is False else _BASIC
    types = _BASIC
    given = schema.get("type")
    names = [given] if isinstance(given, str) else given
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        types = frozenset(names)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        types = _common(types, frozenset(map(type_of, values)))
    for keyword in ("anyOf", "oneOf"):
        options = schema.get(keyword)
        if isinstance(options, list):
            inner = frozenset().union(*(types_of(option, references, depth + 1) for option in options))
            types = _common(types, inner)
    for option in schema.get("allOf", []) if isinstance(schema.get("allOf"), list) else []:
        types = _common(types, types_of(option, references, depth + 1))
    return types


def _common(one: frozenset[str], other: frozenset[str]) -> frozenset[str]:
    both = one & other
    for first, second in ((one, other), (other, one)):
        if "integer" in first and "number" in second:
            both |= {"integer"}
    return both


def are_apart(one: Any, other: Any, references: References, depth: int = 0) -> bool:
    """Returns whether it is certain that no value is valid for both schemas."""
    one, other = references.resolve(one), references.resolve(other)
    if not _common(types_of(one, references), types_of(other, references)):
        return True
    if depth > _MAX_DEPTH or not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return False
    for options, single in ((one, other), (other, one)):
        for keyword in ("anyOf", "oneOf"):
            if isinstance(options.get(keyword), list):
                return all(are_apart(option, single, references, depth + 1) for option in options[keyword])
    values, others = finite_values(one, references), finite_values(other, references)
    if values is not None and others is not None:
        return not {key_of(value) for value in values} & {key_of(value) for value in others}
    return _common(types_of(one, references), types_of(other, references)) == {"object"} and (
        _have_apart_property(one, other, references, depth)
        or _forbids_required(one, other)
        or _forbids_required(other, one)
    )


def _have_apart_property(one: Mapping[str, Any], other: Mapping[str, Any], references: References, depth: int) -> bool:
    """Returns whether both require a property that cannot have the same value in both."""
    properties, others = _properties(one), _properties(other)
    return any(
        are_apart(properties[name], others[name], references, depth + 1)
        for name in _required(one) & _required(other) & properties.keys() & others.keys()
    )


def _forbids_required(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Returns whether objects of `other` have a property that `one` forbids."""
    if one.get("additionalProperties") is not False or one.get("patternProperties"):
        return False
    return bool(_required(other) - _properties(one).keys())


def _required(schema: Mapping[str, Any]) -> set[str]:
    names = schema.get("required")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}
