"""What of JSON Schema an answer can be held to: the grammar that enforces a schema passes over some keywords silently.

A schema with one of those is refused, as its answers might not be valid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MAX_DEPTH = 64
MAX_SCHEMAS = 4096  # within one

# Where the schemas within a schema are.
_SCHEMA = (
    "additionalProperties",
    "items",
    "additionalItems",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")

_REFUSED = frozenset(
    {
        *("multipleOf", "uniqueItems", "contains", "minContains", "maxContains", "not", "if", "then", "else"),
        *("dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
    }
)
_FORMATS = frozenset(
    {
        *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri"),
        *("uri-reference", "json-pointer"),
    }
)


def check_schema(schema: object) -> None:
    """Raises ValueError, with what is wrong, unless answers can be held to `schema`."""
    for number, (part, depth) in enumerate(_parts(schema, 1)):
        if number >= MAX_SCHEMAS:
            raise ValueError(f"has more than {MAX_SCHEMAS} schemas within it")
        if depth > MAX_DEPTH:
            raise ValueError(f"is more than {MAX_DEPTH} schemas deep")
        if isinstance(part, bool):
            continue
        if not isinstance(part, Mapping):
            raise ValueError("has something that is no schema where one should be")
        _check_keywords(part)


def _check_keywords(schema: Mapping[str, Any]) -> None:
    for keyword in _SCHEMAS:
        if keyword in schema and not isinstance(schema[keyword], list):
            raise ValueError(f"has no list of schemas at {keyword}")
    for keyword in _NAMED_SCHEMAS:
        if keyword in schema and not isinstance(schema[keyword], Mapping):
            raise ValueError(f"has no object of schemas at {keyword}")
    for keyword in _REFUSED & schema.keys():
        if schema[keyword] is not False:  # as of uniqueItems
            raise ValueError(f"has the keyword {keyword}, which cannot be enforced")
    has_length = "minLength" in schema or "maxLength" in schema
    if has_length and ("pattern" in schema or "format" in schema):
        raise ValueError("has a length beside a pattern or format, which cannot be enforced together")
    if "format" in schema and not (isinstance(schema["format"], str) and schema["format"] in _FORMATS):
        raise ValueError(f"has the format {str(schema['format'])[:40]!r}, which cannot be enforced")
    if len(schema.get("allOf", ())) > 1:
        raise ValueError("has an allOf of several schemas, which cannot be enforced: merge them")
    reference = schema.get("$ref")
    if reference is not None and not (isinstance(reference, str) and reference.startswith("#")):
        raise ValueError(f"has a $ref to elsewhere ({str(reference)[:80]!r}): it has to begin with #")
    with_patterns, with_names = schema.get("patternProperties"), schema.get("propertyNames")
    if (with_patterns and ("properties" in schema or len(with_patterns) > 1)) or (
        with_names is not None and ("properties" in schema or with_patterns)
    ):
        raise ValueError("has patternProperties or propertyNames beside other properties, which cannot be enforced")


def _parts(schema: object, depth: int) -> Iterator[tuple[object, int]]:
    """`schema` and all schemas within it, each with its depth; not beyond the first level that is too deep."""
    waiting = [(schema, depth)]
    while waiting:
        part, depth = waiting.pop()
        yield part, depth
        if isinstance(part, Mapping) and depth <= MAX_DEPTH:
            waiting.extend((inner, depth + 1) for inner in _within(part))


def _within(schema: Mapping[str, Any]) -> Iterator[object]:
    for keyword in _SCHEMA:
        if keyword in schema:
            inner = schema[keyword]
            yield from inner if isinstance(inner, list) else (inner,)
    for keyword in _SCHEMAS:
        yield from schema.get(keyword, [])
    for keyword in _NAMED_SCHEMAS:
        yield from schema.get(keyword, {}).values()
