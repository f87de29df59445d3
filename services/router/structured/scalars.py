"""Translates the string and number keywords of a schema."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cluster.grammars.numbers import max_decimals
from services.router.structured.errors import SchemaError, at
from services.router.structured.formats import PATTERNS, UNCHECKED
from services.router.structured.patterns import Pattern, PatternError, rewrite

MAX_COUNT = 2**20  # characters, items or properties
_MAX_LEAST_LENGTH = 4096  # characters of a string that has to match an expression
_MAX_NUMBER = 2**53  # beyond it many JSON parsers merge neighbouring integers


def string(schema: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Returns the schema of the strings that `schema` allows. Raises SchemaError."""
    pattern, shortest, longest = _limits(schema, path)
    found: dict[str, Any] = {"type": "string"}
    if pattern is not None:
        found["pattern"] = pattern.text
    if shortest:
        found["minLength"] = shortest
    return found | ({} if longest is None else {"maxLength": longest})


def texts_of(schema: Mapping[str, Any], path: str) -> list[str] | None:
    """Returns the strings that `schema` allows; None if there are many. Raises SchemaError."""
    pattern, shortest, longest = _limits(schema, path)
    texts = None if pattern is None else pattern.texts()
    if texts is None:
        return None
    return [text for text in texts if shortest <= len(text) and (longest is None or len(text) <= longest)]


def _limits(schema: Mapping[str, Any], path: str) -> tuple[Pattern | None, int, int | None]:
    """Returns the pattern, if there is one, and the lengths that it does not already ensure."""
    shortest, longest = count(schema, "minLength", path) or 0, count(schema, "maxLength", path)
    if longest is not None and longest < shortest:
        raise SchemaError(at(path, "maxLength"), "is less than minLength: no string is allowed")
    pattern = _pattern(schema, path)
    if pattern is not None:
        least, most = pattern.node.widths
        what = "pattern" if "pattern" in schema else "format"
        if longest is not None and longest < least:
            raise SchemaError(
                at(path, "maxLength"), f"conflicts with the {what}: its texts have at least {least} characters"
            )
        if most is not None and most < shortest:
            raise SchemaError(
                at(path, "minLength"), f"conflicts with the {what}: its texts have at most {most} characters"
            )
        if most is not None and longest is not None and most <= longest:
            longest = None
        if shortest <= least:
            shortest = 0
        if shortest > _MAX_LEAST_LENGTH:
            raise SchemaError(at(path, "minLength"), f"should be at most {_MAX_LEAST_LENGTH} with a {what}")
    return pattern, shortest, longest


def _pattern(schema: Mapping[str, Any], path: str) -> Pattern | None:
    """Returns the expression of `pattern` or `format`; None if they do not limit the text."""
    name = schema.get("format")
    if name is not None and not isinstance(name, str):
        raise SchemaError(at(path, "format"), "should be a string")
    if name in UNCHECKED:
        name = None
    if name is not None and name not in PATTERNS:
        raise SchemaError(at(path, "format"), f"is {name[:40]!r}, which cannot be enforced: use a pattern")
    if "pattern" not in schema:
        return None if name is None else PATTERNS[name]
    if name is not None:
        raise SchemaError(at(path, "pattern"), "cannot be enforced together with a format: leave one out")
    if not isinstance(schema["pattern"], str):
        raise SchemaError(at(path, "pattern"), "should be a string")
    try:
        return rewrite(schema["pattern"])
    except PatternError as error:
        raise SchemaError(at(path, "pattern"), str(error)) from error


def integer(schema: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Returns the schema of the integers that `schema` allows. Raises SchemaError."""
    _check_number(schema, path)
    low, high = -math.inf, math.inf
    for keyword, value in _bounds(schema, path):
        match keyword:
            case "minimum":
                low = max(low, math.ceil(value))
            case "exclusiveMinimum":
                low = max(low, math.floor(value) + 1)
            case "maximum":
                high = min(high, math.floor(value))
            case "exclusiveMaximum":
                high = min(high, math.ceil(value) - 1)
    if low > high:
        raise SchemaError(at(path, _lower_bound(schema)), "is above the upper bound: no integer is allowed")
    bounds = {"minimum": low, "maximum": high}
    return {"type": "integer", **{name: bound for name, bound in bounds.items() if math.isfinite(bound)}}


def number(schema: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Returns the schema of the numbers that `schema` allows. Raises SchemaError."""
    _check_number(schema, path)
    bounds = dict(_bounds(schema, path))
    low = max(bounds.get("minimum", -math.inf), bounds.get("exclusiveMinimum", -math.inf))
    high = min(bounds.get("maximum", math.inf), bounds.get("exclusiveMaximum", math.inf))
    if low > high:
        raise SchemaError(at(path, _lower_bound(schema)), "is above the upper bound: no number is allowed")
    if low == high and low not in (bounds.get("exclusiveMinimum"), bounds.get("exclusiveMaximum")):
        return {"const": low}
    smallest = 10 * 10.0 ** -max_decimals(bounds)
    if high - low < smallest:
        raise SchemaError(
            at(path, _lower_bound(schema)), f"leaves a range smaller than {smallest:g}, which cannot be enforced"
        )
    return {"type": "number", **bounds}


def _lower_bound(schema: Mapping[str, Any]) -> str:
    return "exclusiveMinimum" if "exclusiveMinimum" in schema else "minimum"


def _check_number(schema: Mapping[str, Any], path: str) -> None:
    name = schema.get("format")
    if name is not None and not (isinstance(name, str) and name in UNCHECKED | PATTERNS.keys()):
        raise SchemaError(at(path, "format"), f"is {str(name)[:40]!r}, which cannot be enforced")
    if "multipleOf" in schema:
        raise SchemaError(at(path, "multipleOf"), "cannot be enforced: leave it out, or list the values in an enum")


def _bounds(schema: Mapping[str, Any], path: str) -> list[tuple[str, float]]:
    found = []
    for keyword in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        if keyword in schema:
            value = schema[keyword]
            if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= _MAX_NUMBER:
                raise SchemaError(at(path, keyword), "should be a number from -2^53 to 2^53")
            found.append((keyword, value))
    return found


def count(schema: Mapping[str, Any], keyword: str, path: str) -> int | None:
    """Returns the value of a keyword that counts something; None if `schema` does not have it."""
    value = schema.get(keyword)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if keyword in schema and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise SchemaError(at(path, keyword), "should be an integer of at least 0")
    if value is not None and value > MAX_COUNT:
        raise SchemaError(at(path, keyword), f"should be at most {MAX_COUNT}")
    return value
