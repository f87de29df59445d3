"""Whatever a model says, a schema that is accepted is kept: random schemas, and a model that answers at random."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from services.router.structured.enforceable import to_enforceable
from services.router.structured.errors import SchemaError
from tests.soak import length

from .random_model import RandomModel
from .random_schemas import SchemaGenerator

NUM_SCHEMAS = length(60, 200)
NUM_ANSWERS = 4


@pytest.fixture(scope="module")
def model() -> RandomModel:
    return RandomModel(seed=1)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the object of `pairs`, in which no key is repeated."""
    found = dict(pairs)
    assert len(found) == len(pairs), f"a key is repeated: {pairs}"
    return found


def assert_kept(model: RandomModel, schema: Any, num_answers: int = NUM_ANSWERS) -> int:
    """Asserts that answers to `schema` are valid for it; returns how many there were."""
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    enforced, num_ended = to_enforceable(schema), 0
    for _ in range(num_answers):
        text = model.answer(enforced)
        if text is None:
            continue
        num_ended += 1
        try:
            validator.validate(json.loads(text, object_pairs_hook=unique))
        except (ValueError, AssertionError, jsonschema.ValidationError) as error:
            raise AssertionError(f"{schema}: {text!r} is not valid: {error}") from error
    return num_ended


def test_random_schemas_are_kept_or_refused(model: RandomModel) -> None:
    generator = SchemaGenerator(random.Random(7))
    num_kept = num_ended = 0
    for _ in range(NUM_SCHEMAS):
        schema = generator.draw()
        try:
            num_ended += assert_kept(model, schema)
        except SchemaError:
            continue
        num_kept += 1
    assert num_kept > NUM_SCHEMAS / 2
    assert num_ended > num_kept * NUM_ANSWERS * 0.95, "nearly every answer came to its end"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "required": ["a"]},
        {"type": "object", "minProperties": 2},
        {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "null"}},
        {"type": "object", "properties": {"a": True}, "required": ["a"]},
        {"type": "array", "items": True},
        {"type": "array", "minItems": 2, "prefixItems": [{"type": "null"}, {"type": "boolean"}]},
        {"type": "string", "minLength": 1, "maxLength": 3},
        {"type": "string", "format": "email", "maxLength": 30},
        {"type": "string", "pattern": "^([a-z]+ )*[a-z]+$", "minLength": 5, "maxLength": 20},
        {"type": "object", "patternProperties": {"^[ab]$": {"type": "null"}}, "minProperties": 2},
        {"type": "string", "pattern": "^a(cb{1,3})?$"},
        {"anyOf": [{"type": "object", "properties": {"title": {"const": n}}, "required": ["title"]} for n in (1, "x")]},
    ],
)
def test_an_example_is_kept(model: RandomModel, schema: Any) -> None:
    assert assert_kept(model, schema, num_answers=40) >= 36
