"""The schemas that pydantic makes of everyday types are kept, or refused with what to use instead."""

from __future__ import annotations

import re
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from pydantic import UUID1, UUID3, UUID4, UUID5, BaseModel, Field, HttpUrl, SecretStr, create_model
from pydantic.json_schema import WithJsonSchema

from services.router.structured.enforceable import to_enforceable
from services.router.structured.errors import SchemaError

from .random_model import RandomModel
from .test_random_answers import assert_kept

DECIMAL = "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$"  # as pydantic 2.12 writes it


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=0, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"]
    friends: list[Dog] = []


@pytest.fixture(scope="module")
def model() -> RandomModel:
    return RandomModel(seed=2)


@pytest.mark.parametrize(
    "type_",
    [
        pytest.param(type_, id=str(type_)[:40])
        for type_ in (
            *(HttpUrl, UUID, UUID1, UUID3, UUID4, UUID5, SecretStr, Path, bytes, Any, list, dict),
            *(set[Colour], set[Literal["a", "b", "c"]], set[bool], frozenset[Literal[1, 2]], Colour | None),
            *(dict[str, int], dict[Colour, int], dict[UUID, str], dict[Annotated[str, Field(pattern="^a+$")], int]),
            *(tuple[int, str], tuple[int, ...], Annotated[str, Field(min_length=2, max_length=5)]),
            *(Annotated[str, Field(max_length=length)] for length in (0, 255, 300, 10_000)),
            *(
                Annotated[str, Field(pattern="^[A-Z][a-z]*$", max_length=40)],
                list[Annotated[str, Field(max_length=200)]],
            ),
            Annotated[list[int], Field(max_length=1000)],
            Annotated[str, WithJsonSchema({"type": "string", "format": "email", "maxLength": 254})],
            *(Annotated[str, Field(pattern="^[a-z]+$", max_length=5)], Annotated[float, Field(gt=0, lt=1)]),
            *(Annotated[Cat | Dog, Field(discriminator="kind")], Annotated[dict[str, int], Field(min_length=2)]),
            *(Annotated[int, WithJsonSchema({"type": "integer", "format": name})] for name in ("int32", "int64")),
            Annotated[float, WithJsonSchema({"type": "number", "format": "double"})],
            Annotated[str, WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string", "pattern": DECIMAL}]})],
        )
    ],
)
def test_a_field_of_the_type_is_kept(model: RandomModel, type_: Any) -> None:
    for schema in (create_model("Fields", x=(type_, ...)), create_model("Fields", x=(type_ | None, None))):
        assert assert_kept(model, schema.model_json_schema(), num_answers=6) > 3


def test_everyday_models_are_kept(model: RandomModel) -> None:
    class Order(BaseModel):
        price: Decimal
        page: HttpUrl
        ids: tuple[UUID1, UUID3, UUID4, UUID5]
        secret: SecretStr | None
        path: Path
        data: bytes
        colours: set[Colour] = set()
        pets: list[Annotated[Cat | Dog, Field(discriminator="kind")]]

    for mode in ("validation", "serialization"):
        assert_kept(model, Order.model_json_schema(mode=mode))


def test_a_decimal_has_a_digit() -> None:
    kept = to_enforceable({"type": "string", "pattern": DECIMAL})["pattern"]
    for text in ("1", "-1.5", "+.5", "007.", "0"):
        assert re.fullmatch(kept, text)
    for text in ("", "-", ".", "+.", "1.2.3"):
        assert not re.fullmatch(kept, text)


def test_a_set_of_strings_is_refused() -> None:
    with pytest.raises(
        SchemaError, match=r"^\.properties\.x\.uniqueItems can only be enforced over items that are an enum"
    ):
        to_enforceable(create_model("Fields", x=(set[str], ...)).model_json_schema())
