"""Translates the array keywords of a schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any

from services.router.structured.errors import SchemaError, at
from services.router.structured.references import References
from services.router.structured.scalars import count
from services.router.structured.values import finite_values, key_of

MAX_UNIQUE_VALUES = 8

Translate = Callable[[Any, str], dict[str, Any]]


def array(schema: Mapping[str, Any], path: str, translate: Translate, references: References) -> dict[str, Any]:
    """Returns the schema of the arrays that `schema` allows. Raises SchemaError.

    Without `items`, no items follow those of `prefixItems`, unless `minItems` requires more.
    """
    for keyword in ("contains", "minContains", "maxContains"):
        if keyword in schema:
            raise SchemaError(at(path, keyword), "cannot be enforced: give a schema for all items")
    least = count(schema, "minItems", path) or 0
    most = count(schema, "maxItems", path)
    prefix = schema.get("prefixItems", [])
    if not isinstance(prefix, list):
        raise SchemaError(at(path, "prefixItems"), "should be a list of schemas")
    items = _items(schema, least, len(prefix))
    if isinstance(items, list):
        raise SchemaError(at(path, "items"), "should be a schema: a list of them belongs in prefixItems")
    if items is False:
        most = len(prefix) if most is None else min(most, len(prefix))
    if most is not None and least > most:
        raise SchemaError(at(path, "minItems"), "is more than the number of allowed items")
    keyword = "items" if "items" in schema else "unevaluatedItems"
    if schema.get("uniqueItems", False) is not False and (most is None or most > 1):
        return _unique(schema, path, least, most, references)
    places = [at(path, "prefixItems", index) for index in range(len(prefix))]
    shown = [translate(part, place) for part, place in zip(prefix, places, strict=True)][:most]
    found: dict[str, Any] = {"type": "array"}
    if shown:
        found["prefixItems"] = shown
    if least:
        found["minItems"] = least
    if most is not None and most <= len(shown):
        return found | ({"items": False} if shown else {"maxItems": 0, "items": {}})
    if most is not None:
        found["maxItems"] = most
    return found | {"items": translate(items, at(path, keyword))}


def _items(schema: Mapping[str, Any], least: int, num_first: int) -> Any:
    """Returns the schema of the items after the first `num_first`."""
    for keyword in ("items", "unevaluatedItems"):
        if keyword in schema:
            return schema[keyword]
    return not num_first or least > num_first


def _unique(
    schema: Mapping[str, Any], path: str, least: int, most: int | None, references: References
) -> dict[str, Any]:
    """Returns the schema of arrays of distinct items.

    Each array has some of the listed values, in the order of the list.
    """
    values = None if "prefixItems" in schema else finite_values(schema.get("items"), references)
    where = at(path, "uniqueItems")
    if values is None:
        raise SchemaError(where, "can only be enforced over items that are an enum: leave it out and remove duplicates")
    distinct = list({key_of(value): value for value in values}.values())
    if len(distinct) > MAX_UNIQUE_VALUES:
        raise SchemaError(where, f"can only be enforced over an enum of at most {MAX_UNIQUE_VALUES} values")
    sizes = range(least, min(len(distinct), len(distinct) if most is None else most) + 1)
    if not sizes:
        raise SchemaError(at(path, "minItems"), f"is more than the {len(distinct)} existing values")
    arrays = [chosen for size in sizes for chosen in combinations(distinct, size)]
    options = [
        {"type": "array", "prefixItems": list(map(_constant, chosen)), "minItems": len(chosen), "items": False}
        if chosen
        else {"type": "array", "maxItems": 0, "items": {}}
        for chosen in arrays
    ]
    return {"anyOf": options}


def _constant(value: object) -> dict[str, Any]:
    return {"const": value}
