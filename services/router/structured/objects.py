"""Translates the object keywords of a schema."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from services.router.structured.errors import SchemaError, at
from services.router.structured.references import References
from services.router.structured.scalars import count, string, texts_of
from services.router.structured.values import finite_values

Translate = Callable[[Any, str], dict[str, Any]]

_REFUSED = ("dependentRequired", "dependentSchemas", "dependencies")


@dataclass
class _Object:
    """The parts of an object's schema; schemas within it are not translated yet."""

    properties: dict[str, tuple[Any, str]]  # schema and path by name
    required: list[str]
    others: Any  # schema of the values of all other names; False: there are no others
    others_path: str
    names: dict[str, Any] | None = None  # schema of all other names; None: any name


def object_(schema: Mapping[str, Any], path: str, translate: Translate, references: References) -> dict[str, Any]:
    """Returns the schema of the objects that `schema` allows. Raises SchemaError.

    A schema that names properties allows no others, unless it has a keyword for them or `minProperties` requires more.
    """
    for keyword in _REFUSED:
        if keyword in schema:
            raise SchemaError(at(path, keyword), "cannot be enforced: use anyOf of objects instead")
    least = count(schema, "minProperties", path) or 0
    most = count(schema, "maxProperties", path)
    parts = _parts(schema, path, least)
    _apply_names(parts, schema, path, references)
    _apply_patterns(parts, schema, path)
    _add_required(parts, path)
    if most is not None and max(least, len(parts.required)) > most:
        raise SchemaError(at(path, "maxProperties"), "is less than the number of required properties")
    if parts.others is False and least > len(parts.properties):
        raise SchemaError(at(path, "minProperties"), "is more than the number of allowed properties")
    return _written(parts, path, least, most, translate)


def _parts(schema: Mapping[str, Any], path: str, least: int) -> _Object:
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        raise SchemaError(at(path, "properties"), "should be an object of schemas")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise SchemaError(at(path, "required"), "should be a list of names")
    required = list(dict.fromkeys(required))
    for keyword in ("additionalProperties", "unevaluatedProperties"):
        if keyword in schema:
            others, others_path = schema[keyword], at(path, keyword)
            break
    else:
        has_names = "properties" in schema or bool(required)
        others, others_path = not has_names or least > len(properties.keys() | set(required)), path
    placed = {name: (inner, at(path, "properties", name)) for name, inner in properties.items()}
    return _Object(placed, required, others, others_path)


def _apply_names(parts: _Object, schema: Mapping[str, Any], path: str, references: References) -> None:
    """Applies `propertyNames`: listed names become properties, others must match an expression."""
    if "propertyNames" not in schema:
        return
    place = at(path, "propertyNames")
    names = references.resolve(schema["propertyNames"])
    if names is True:
        return
    if not isinstance(names, Mapping):
        raise SchemaError(place, "should be a schema of names")
    values = finite_values(names, references)
    if values is not None:
        _check_names(parts, place, lambda name: name in values)
        _list_names(parts, [value for value in values if isinstance(value, str)])
        return
    if names.get("type", "string") != "string" or any(key in names for key in ("anyOf", "oneOf", "allOf", "not", "if")):
        raise SchemaError(place, "can only be enforced as an enum, or as a pattern, format or length of strings")
    kept, texts = string(names, place), texts_of(names, place)
    if kept == {"type": "string"}:
        return
    if texts is not None:
        _check_names(parts, place, lambda name: name in texts)
        _list_names(parts, texts)
    elif parts.properties or parts.required:
        raise SchemaError(place, "can only be enforced as an enum in a schema that names properties")
    elif parts.others is not False:
        parts.names = kept


def _check_names(parts: _Object, place: str, is_allowed: Callable[[str], bool]) -> None:
    for name in [*parts.properties, *parts.required]:
        if not is_allowed(name):
            raise SchemaError(place, f"forbids {name[:40]!r}, which is a property of the schema")


def _list_names(parts: _Object, names: Iterable[str]) -> None:
    """Makes `names` properties, if other names are allowed, and then forbids all others."""
    for name in names if parts.others is not False else ():
        parts.properties.setdefault(name, (parts.others, parts.others_path))
    parts.others = False


def _apply_patterns(parts: _Object, schema: Mapping[str, Any], path: str) -> None:
    patterns = schema.get("patternProperties", {})
    place = at(path, "patternProperties")
    if not isinstance(patterns, Mapping):
        raise SchemaError(place, "should be an object of schemas")
    if not patterns:
        return
    if len(patterns) > 1 or parts.properties or "propertyNames" in schema:
        raise SchemaError(place, "can only be enforced with one pattern, and without properties and propertyNames")
    ((pattern, inner),) = patterns.items()
    parts.others, parts.others_path = inner, at(place, pattern)
    names = {"pattern": pattern}
    texts = texts_of(names, at(place, pattern))
    if texts is not None:
        _list_names(parts, texts)
    elif inner is not False:
        parts.names = string(names, at(place, pattern))


def _add_required(parts: _Object, path: str) -> None:
    """Adds the required properties that `properties` does not have."""
    for name in parts.required:
        if name in parts.properties:
            continue
        explicit = parts.others_path != path  # a keyword defines other names
        if explicit and parts.others is False:
            raise SchemaError(at(path, "required"), f"has {name[:40]!r}, which the schema forbids")
        parts.properties[name] = (parts.others, parts.others_path) if explicit else (True, path)
    for name, (inner, place) in list(parts.properties.items()):
        if inner is False and (name in parts.required or parts.others is not False):
            raise SchemaError(place, "is false, which cannot be enforced for a property that is required or allowed")
        if inner is False:
            del parts.properties[name]
    if parts.properties and parts.names is not None:
        raise SchemaError(path, "has names by a pattern next to other properties, which cannot be enforced")


def _written(parts: _Object, path: str, least: int, most: int | None, translate: Translate) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "object"}
    if parts.properties and most != 0:
        found["properties"] = {name: translate(*placed) for name, placed in parts.properties.items()}
    if parts.required:
        found["required"] = parts.required
    if least > len(parts.required):
        found["minProperties"] = least
    if parts.others is False or most in (0, len(parts.required)):
        if most is not None and most < len(found.get("properties", ())):
            found["maxProperties"] = most
        return found | {"additionalProperties": False}
    if most is not None:
        found["maxProperties"] = most
    if parts.names is not None:
        found["propertyNames"] = parts.names
    if len(found) > 1 or parts.others is not True:
        found["additionalProperties"] = translate(parts.others, parts.others_path)
    return found
