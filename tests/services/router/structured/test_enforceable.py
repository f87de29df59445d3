"""A schema is translated to one that a grammar enforces, or refused with the path of the keyword."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from services.router.structured.enforceable import to_enforceable
from services.router.structured.errors import SchemaError

KEYWORDS = (
    *("allOf", "anyOf", "oneOf", "prefixItems", "items", "properties", "patternProperties", "$defs", "definitions"),
    *("additionalProperties", "propertyNames", "format", "$ref", "type", "enum", "minLength", "pattern", "not"),
    *("required", "minProperties", "maxProperties", "minItems", "maxItems", "uniqueItems", "minimum", "const"),
)
VALUES = (None, True, False, -1, 1.5, 10**30, "x", [], {}, [None], {"a": None}, [[]], {"a": []})

LONG_CHAIN = {"$ref": "#/$defs/0", "$defs": {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(500)}}


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_any_value_of_a_keyword_is_taken_or_refused(keyword: str) -> None:
    for value in VALUES:
        for schema in ({keyword: value}, {"type": "string", keyword: value}, {"properties": {"a": {keyword: value}}}):
            with contextlib.suppress(SchemaError):
                to_enforceable(schema)


@pytest.mark.parametrize(
    ("schema", "path", "reason"),
    [
        (5, "", "should be a schema"),
        ({"allOf": 5}, ".allOf", "a list of schemas"),
        ({"patternProperties": True}, ".patternProperties", "an object of schemas"),
        ({"format": []}, ".format", "a string"),
        ({"format": "colour"}, ".format", "'colour', which cannot be enforced"),
        ({"anyOf": [5]}, ".anyOf[0]", "should be a schema"),
        ({"type": "text"}, ".type", "one or more of string"),
        ({"properties": {"a": {"multipleOf": 5}}}, ".properties.a.multipleOf", "enum"),
        ({"properties": {"a": {"items": {"not": {}}}}}, ".properties.a.items.not", "cannot be enforced"),
        ({"allOf": [{"type": "object"}, {"minProperties": 1}]}, ".allOf", "merge them"),
        ({"$ref": "https://example.com/schema"}, ".$ref", "begin with #/"),
        ({"$ref": "#anchor"}, ".$ref", "begin with #/"),
        ({"$ref": "#/$defs/a"}, ".$ref", "not in the schema"),
        ({"$ref": "#/$defs/a", "minLength": 2, "$defs": {"a": {}}}, ".minLength", "together with $ref"),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "anyOf": [{}, {"$ref": "#/$defs/a"}]}, ".$defs.a", "to itself"),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "", "no finite value"),
        ({"items": [{"type": "string"}]}, ".items", "prefixItems"),
        ({"items": False, "minItems": 1}, ".minItems", "more than the number of allowed items"),
        ({"contains": {}}, ".contains", "cannot be enforced"),
        ({"dependentRequired": {"a": ["b"]}}, ".dependentRequired", "anyOf"),
        ({"enum": []}, ".enum", "allows no value"),
        ({"enum": ["a"], "minLength": 2}, ".minLength", "together with enum"),
        ({"const": 2**64}, ".const", "64 bits"),
        ({"type": "integer", "minimum": 0.5, "maximum": 0.7}, ".minimum", "no integer"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1e-7}, ".exclusiveMinimum", "range"),
        ({"pattern": "a(?=b)"}, ".pattern", "look-ahead"),
        ({"pattern": r"\ba"}, ".pattern", "word boundary"),
        ({"pattern": r"(a)\1"}, ".pattern", "reference to a group"),
        ({"pattern": 'a"'}, ".pattern", "without escapes"),
        ({"pattern": "["}, ".pattern", "not a valid regular expression"),
        ({"pattern": "^ab{5,}$", "maxLength": 5}, ".maxLength", "conflicts with the pattern"),
        ({"format": "uuid", "maxLength": 5}, ".maxLength", "conflicts with the format"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, ".oneOf", "use anyOf"),
        ({"oneOf": [{"const": 1}, {"enum": [1.0, 2]}]}, ".oneOf", "use anyOf"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, ".required", "'a'"),
        ({"properties": {"a": {}}, "minProperties": 2, "additionalProperties": False}, ".minProperties", "allowed"),
        ({"required": ["a", "b"], "maxProperties": 1}, ".maxProperties", "the number of required properties"),
        ({"properties": {"b": {}}, "propertyNames": {"enum": ["a"]}}, ".propertyNames", "forbids 'b'"),
        ({"items": {"type": "string"}, "uniqueItems": True}, ".uniqueItems", "remove duplicates"),
        ({"items": {"enum": list(range(9))}, "uniqueItems": True}, ".uniqueItems", "at most 8 values"),
        ({"oneOf": [{"type": 5}, {"type": "null"}]}, ".oneOf", "use anyOf"),
        ({"oneOf": [{"type": "object", "required": True}, {"type": "null"}]}, ".oneOf[0].required", "list of names"),
        ({"oneOf": [{"type": "object", "required": 5}, {"type": "object"}]}, ".oneOf", "use anyOf"),
        (
            {"oneOf": [{"properties": 5, "required": ["a"]}, {"type": "object", "required": ["a"]}]},
            ".oneOf",
            "use anyOf",
        ),
        ({"type": 5, "anyOf": [{"type": "null"}]}, ".type", "one or more of"),
        ({"propertyNames": {"type": [{}], "minLength": 1}}, ".propertyNames", "as an enum"),
        (LONG_CHAIN, "", "more than 256 definitions"),
        ({"oneOf": [{"const": n} for n in range(2000)]}, "", "takes too long to check"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_its_path(schema: Any, path: str, reason: str) -> None:
    with pytest.raises(SchemaError) as raised:
        to_enforceable(schema)
    assert raised.value.path == path
    assert reason in raised.value.reason


@pytest.mark.parametrize(
    ("schema", "kept"),
    [
        (True, {}),
        ({}, {}),
        ({"title": "T", "description": "D", "unknown": 5}, {}),
        ({"type": "array"}, {"type": "array", "items": {}}),
        ({"type": "array", "items": True}, {"type": "array", "items": {}}),
        ({"type": "object"}, {"type": "object"}),
        ({"type": "object", "properties": {}}, {"type": "object", "additionalProperties": False}),
        (
            {"type": "object", "properties": {"a": True}},
            {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
        ),
        (
            {"type": "object", "required": ["a"]},
            {"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": False},
        ),
        (
            {"type": "object", "minProperties": 2},
            {"type": "object", "minProperties": 2, "additionalProperties": {}},
        ),
        (
            {"additionalProperties": {"type": "null"}, "propertyNames": {"enum": ["a"]}},
            {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": False},
        ),
        ({"type": "integer", "exclusiveMinimum": 0.5, "maximum": 3}, {"type": "integer", "minimum": 1, "maximum": 3}),
        ({"type": "integer", "format": "int32"}, {"type": "integer"}),
        ({"type": "integer", "minLength": 3}, {"type": "integer"}),
        ({"enum": ["a", 1, None], "type": ["string", "null"]}, {"enum": ["a", None]}),
        (
            {"type": "array", "items": {"type": "string"}, "uniqueItems": False},
            {"type": "array", "items": {"type": "string"}},
        ),
        ({"allOf": [{"type": "null"}], "default": None}, {"type": "null"}),
        ({"type": "object", "anyOf": [{"type": "object"}]}, {"anyOf": [{"type": "object"}]}),
        (
            {"oneOf": [{"type": "null"}, {"minLength": 0, "type": "string"}]},
            {"anyOf": [{"type": "null"}, {"type": "string"}]},
        ),
    ],
)
def test_what_is_kept(schema: Any, kept: Any) -> None:
    assert to_enforceable(schema) == kept


def test_a_union_of_kinds_keeps_its_one_of() -> None:
    def kind(name: str) -> dict[str, Any]:
        return {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]}

    schema = {
        "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        "$defs": {"cat": kind("cat"), "dog": kind("dog")},
    }
    kept = to_enforceable(schema)
    assert kept["anyOf"] == [{"$ref": "#/$defs/d0"}, {"$ref": "#/$defs/d1"}]
    assert kept["$defs"].keys() == {"d0", "d1"}
    with pytest.raises(SchemaError):
        to_enforceable(
            schema | {"oneOf": [*schema["oneOf"], {"type": "object", "properties": {"kind": {"const": "cow"}}}]}
        )
