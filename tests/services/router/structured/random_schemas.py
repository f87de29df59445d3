"""Random schemas over the keywords that are supported, and some that are refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

NAMES = ("a", "b", "a/b", "title", 'x"y', "é", "default")
VALUES: tuple[Any, ...] = (1, 0, -7, 2.5, "x", "", "é\n", True, False, None, [], [1], {}, {"title": 1}, {"title": 2})
PATTERNS = ("^a+$", "[0-9]{3}", "^(yes|no)$", r"\d\D", "[^a-z]+x", ".{0,3}", "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$", "é|b")
FORMATS = (
    *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uri-reference", "uuid"),
    *("json-pointer", "uuid4", "int32", "password", "path"),
)


class SchemaGenerator:
    """Draws schemas from `rng`. They need not be good: to refuse one is right, too."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def draw(self) -> Any:
        """Returns a schema, with definitions that it may refer to."""
        schema = self._schema(3)
        if isinstance(schema, dict):
            schema["$defs"] = {"a": self._schema(1), "b~/%": self._schema(2)}
        return schema

    def _schema(self, depth: int) -> Any:
        rng = self._rng
        if rng.random() < 0.04:
            return rng.choice((True, True, {}, False))
        scalars = (self._string, self._number, self._integer, self._enum, self._bare)
        nested = (self._object, self._object, self._array, self._any_of, self._one_of, self._reference)
        make: Callable[[int], dict[str, Any]] = rng.choice((*scalars, *nested) if depth else scalars)
        schema = make(depth)
        if rng.random() < 0.03:
            schema |= rng.choice(({"not": {}}, {"if": {}}, {"allOf": [{}, {}]}, {"multipleOf": 3}, {"minLength": 2}))
        if rng.random() < 0.05:
            schema["title"] = "T"
        return schema

    def _some(self, **keywords: Callable[[], Any]) -> dict[str, Any]:
        """Returns each of `keywords` with a chance of a third."""
        return {name: draw() for name, draw in keywords.items() if self._rng.random() < 0.33}

    def _small(self) -> int:
        return self._rng.randrange(5)

    def _string(self, depth: int) -> dict[str, Any]:
        found = self._some(minLength=self._small, maxLength=self._small)
        if self._rng.random() < 0.6:
            name, values = self._rng.choice((("pattern", PATTERNS), ("format", FORMATS)))
            found = {name: self._rng.choice(values)} | (found if self._rng.random() < 0.2 else {})
        return {"type": "string"} | found

    def _bound(self) -> float:
        return self._rng.choice((0, 1, -3, 0.5, 10, -2.25, 1000, 7, 99999, -0.001))

    def _number(self, depth: int) -> dict[str, Any]:
        bound = self._bound
        return {"type": "number"} | self._some(
            minimum=bound, maximum=bound, exclusiveMinimum=bound, exclusiveMaximum=bound
        )

    def _integer(self, depth: int) -> dict[str, Any]:
        return self._number(depth) | {"type": "integer"}

    def _enum(self, depth: int) -> dict[str, Any]:
        if self._rng.random() < 0.3:
            return {"const": self._rng.choice(VALUES)}
        found: dict[str, Any] = {"enum": self._rng.sample(VALUES, self._rng.randrange(1, 5))}
        return found | self._some(type=lambda: self._rng.choice(("string", "integer", ["number", "null"])))

    def _bare(self, depth: int) -> dict[str, Any]:
        types = ["boolean", "null", "string", "integer", "array", "object"]
        return self._rng.choice(
            (
                {"type": self._rng.choice(types)},
                {"type": self._rng.sample(types, 2)},
                {"minLength": 2},
                {"minimum": 3},
                {"required": ["b"]},
                {"minItems": 1},
                {"format": "date"},
            )
        )

    def _object(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        found = {"type": "object"} | self._some(minProperties=self._small, maxProperties=self._small)
        match rng.randrange(6):
            case 0:
                found["patternProperties"] = {rng.choice(PATTERNS): self._schema(depth - 1)}
            case 1:
                names = (
                    {"pattern": rng.choice(PATTERNS)},
                    {"enum": ["a", "b", "c"]},
                    {"maxLength": 3},
                    {"format": "date"},
                )
                found["propertyNames"] = rng.choice(names)
            case 2:
                pass
            case _:
                names_of = rng.sample(NAMES, rng.randrange(4))
                found["properties"] = {name: self._schema(depth - 1) for name in names_of}
        if rng.random() < 0.4:
            found["additionalProperties"] = self._schema(depth - 1)
        if rng.random() < 0.5:
            found["required"] = rng.sample(NAMES, rng.randrange(3))
        return found

    def _array(self, depth: int) -> dict[str, Any]:
        found = {"type": "array"} | self._some(
            minItems=self._small,
            maxItems=self._small,
            prefixItems=lambda: [self._schema(depth - 1) for _ in range(self._rng.randrange(1, 3))],
        )
        if self._rng.random() < 0.7:
            found["items"] = self._schema(depth - 1)
        if self._rng.random() < 0.2:
            found["uniqueItems"] = True
        return found

    def _any_of(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self._schema(depth - 1) for _ in range(self._rng.randrange(1, 4))]}

    def _one_of(self, depth: int) -> dict[str, Any]:
        if self._rng.random() < 0.5:
            return {"oneOf": [self._schema(depth - 1) for _ in range(2)]}
        options = [
            {"properties": {"kind": {"const": kind}, "x": self._schema(depth - 1)}, "required": ["kind"]}
            for kind in ("a", "b")
        ]
        return {"oneOf": [option | {"type": "object"} for option in options]}

    def _reference(self, depth: int) -> dict[str, Any]:
        return {"$ref": self._rng.choice(("#", "#/$defs/a", "#/$defs/b~0~1%25"))}
