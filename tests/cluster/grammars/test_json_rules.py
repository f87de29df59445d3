"""The texts that the rules of a schema allow, and those that they do not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.constraints import Grammar
from cluster.errors import InvalidRequestError

from .test_compiler import accepts, run

CLOSED = {"type": "object", "additionalProperties": False}
INTEGER = {"type": "integer"}
THREE = {
    **CLOSED,
    "properties": {"a": INTEGER, "b": {"type": "string", "maxLength": 3}, "c": {"type": "null"}},
    "required": ["b"],
}
COUNTED = {
    "type": "object",
    "properties": {"a": INTEGER, "b": INTEGER},
    "required": ["b"],
    "minProperties": 3,
    "maxProperties": 4,
    "additionalProperties": {"type": "null"},
}
KINDS = [
    {**CLOSED, "properties": {"k": {"const": "a"}, "x": INTEGER}, "required": ["k", "x"]},
    {**CLOSED, "properties": {"k": {"type": "string"}, "y": INTEGER}, "required": ["k", "y"]},
]
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({}, ['{"a": [1, {"b": null}]}', "-1.5e3", '"x"'], ["01", "1.", "{'a': 1}"]),
    ({"type": "object"}, ["{}", '{\n  "a": 1\n}', '{"a": {}}'], ["[]", '{"a"}', '{"a": 1,}']),
    (THREE, ['{"a": 1, "b": "xyz", "c": null}', '{"b": ""}'], ['{"a": 1}', '{"b": "xyzz"}', '{"b": "", "a": 1}']),
    (
        THREE,
        ['{"b": "\\u00e9\\n\\ud83d\\ude00"}', '{"b": "é世😀"}'],
        ['{"b": "\\ud83d"}', '{"b": "\\u00e9\\n\\\\\\n"}'],
    ),
    ({**THREE, "required": [], "maxProperties": 1}, ["{}", '{"c": null}'], ['{"a": 1, "c": null}']),
    ({**THREE, "required": [], "minProperties": 2}, ['{"a": 1, "c": null}'], ["{}", '{"b": ""}']),
    (
        COUNTED,
        ['{"a": 1, "b": 1, "x": null}', '{"b": 1, "x": null, "y": null, "z": null}'],
        ['{"b": 1}', '{"b": 1, "a": null, "x": null}', '{"a": 1, "b": 1, "x": null, "y": null, "z": null}'],
    ),
    ({"type": "object", "properties": {"a": INTEGER}}, ['{"b": null}'], ['{"a": null}', '{"\\u0061": null}']),
    (
        {"type": "object", "propertyNames": {"type": "string", "pattern": "[a-z]{2}"}, "additionalProperties": INTEGER},
        ['{"ab": 1}', "{}"],
        ['{"a": 1}', '{"ab": null}'],
    ),
    (
        {"type": "array", "prefixItems": [INTEGER, {"type": "null"}], "minItems": 1, "maxItems": 3, "items": INTEGER},
        ["[1]", "[1, null]", "[1, null, 2]"],
        ["[]", "[1, 2]", "[1, null, 2, 3]"],
    ),
    ({"type": "array", "minItems": 2, "maxItems": 100_000, "items": INTEGER}, ["[1, 2]", "[1, 2, 3]"], ["[1]"]),
    ({"type": "array", "maxItems": 1, "items": INTEGER}, ["[]", "[1]"], ["[1, 2]"]),
    ({"type": "array", "maxItems": 0, "items": {}}, ["[]"], ["[1]"]),
    (
        {"anyOf": [{"enum": ["low", "high"]}, {"type": "string", "maxLength": 1000}]},
        ['"low"', '"lower it"', '"' + "x" * 1000 + '"'],
        ['"' + "x" * 1001 + '"'],
    ),
    ({"type": "string", "minLength": 300, "maxLength": 700}, ['"' + "é" * n + '"' for n in (300, 512, 700)], ['"xx"']),
    ({"anyOf": KINDS}, ['{"k": "a", "x": 1}', '{"k": "a", "y": 1}', '{"k": "b", "y": 1}'], ['{"k": "b", "x": 1}']),
    (
        {"enum": [1, 1.5, 'a"', None, True, [1, 2], {"a": []}]},
        ["1", "1.5", '"a\\""', "null", "true", "[1, 2]", '{"a": []}'],
        ["2", "false", "[1]", "{}"],
    ),
    (
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}},
        ["[]", "[[[]], []]"],
        ["[1]"],
    ),
    (
        {"type": "string", "pattern": "[a-z]*b+/?", "minLength": 3, "maxLength": 5},
        ['"aab"', '"abb/"'],
        ['"ab"', '"aaaaab"'],
    ),
    ({"type": "integer", "minimum": -12, "maximum": 105}, ["-12", "0", "105"], ["-13", "106", "-0", "1.0"]),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 5.7}, ["0.000001", "5.7", "5"], ["0", "0.0", "5.71", "1e0"]),
]


@pytest.fixture(scope="module")
def compiled() -> list[Any]:
    return run(*(Grammar("json_schema", json.dumps(schema)) for schema, _, _ in CASES))


@pytest.mark.parametrize("index", range(len(CASES)))
def test_the_texts_of_a_schema(compiled: list[Any], index: int) -> None:
    _, texts, others = CASES[index]
    assert [text for text in texts if not accepts(compiled[index], text)] == []
    assert [text for text in others if accepts(compiled[index], text)] == []


def test_what_rules_do_not_enforce_is_refused() -> None:
    many = {f"p{i}": INTEGER for i in range(100)}
    schemas = [
        {"type": "string", "format": "date"},
        {"type": "nonsense"},
        {**CLOSED, "minProperties": 1},
        {**CLOSED, "properties": many, "minProperties": 60},
    ]
    for refused in run(*(Grammar("json_schema", json.dumps(schema)) for schema in schemas)):
        assert isinstance(refused, InvalidRequestError)


def test_objects_may_have_many_optional_properties() -> None:
    properties = {f"p{i}": {"type": "string", "maxLength": 10_000 + i} for i in range(250)}
    (grammar,) = run(Grammar("json_schema", json.dumps({**CLOSED, "properties": properties})))
    assert accepts(grammar, json.dumps({"p0": "x" * 10_000, "p249": "é\n"}, ensure_ascii=False))
    assert not accepts(grammar, json.dumps({"p0": "x" * 10_001}))
    assert not accepts(grammar, json.dumps({"p1": "", "p0": ""}))


def test_blanks_are_bounded() -> None:
    (grammar,) = run(Grammar("json_schema", '{"type": "array", "items": {"type": "null"}}'))
    assert accepts(grammar, f"[null,{' ' * 16}null]")
    assert not accepts(grammar, f"[null,{' ' * 17}null]")
