"""What is no schema is refused with a reason, whatever it is."""

from __future__ import annotations

import contextlib

import pytest

from cluster.json_schema import check_schema

KEYWORDS = (
    *("allOf", "anyOf", "oneOf", "prefixItems", "items", "properties", "patternProperties", "$defs", "definitions"),
    *("additionalProperties", "propertyNames", "format", "$ref", "type", "enum", "minLength", "pattern", "not"),
)
VALUES = (None, True, False, -1, 1.5, 10**30, "x", [], {}, [None], {"a": None}, [[]], {"a": []})


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_any_value_of_a_keyword_is_taken_or_refused(keyword: str) -> None:
    for value in VALUES:
        for schema in ({keyword: value}, {"type": "string", keyword: value}, {"properties": {"a": {keyword: value}}}):
            with contextlib.suppress(ValueError):
                check_schema(schema)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"allOf": 5}, "no list of schemas at allOf"),
        ({"patternProperties": True}, "no object of schemas at patternProperties"),
        ({"format": []}, "has the format '[]'"),
        ({"anyOf": [5]}, "something that is no schema"),
    ],
)
def test_what_is_wrong_is_named(schema: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason.replace("[", r"\[").replace("]", r"\]")):
        check_schema(schema)
