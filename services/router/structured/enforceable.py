"""Translates schemas of requests into schemas that grammars enforce exactly, or refuses them.

The translation has only keywords that `cluster/grammars/json_rules.py` enforces. It expresses the rest in another way,
or refuses it with the path of the keyword. Every answer to the translated schema is valid for the original; the
translated schema may exclude some valid answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.router.structured.arrays import array
from services.router.structured.errors import SchemaError, at
from services.router.structured.objects import object_
from services.router.structured.references import References, SchemaWork
from services.router.structured.scalars import integer, number, string
from services.router.structured.values import (
    TYPES,
    are_apart,
    finite_values,
    has_exact_numbers,
    key_of,
    types_of,
)

MAX_DEPTH = 64
MAX_DEFINITIONS = 256

_KEYWORDS = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "array": {
        *("items", "prefixItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems"),
        *("contains", "minContains", "maxContains"),
    },
    "object": {
        *("properties", "required", "additionalProperties", "unevaluatedProperties", "minProperties", "maxProperties"),
        *("patternProperties", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies"),
    },
}
"""The keywords that limit values of a type; "number" has those of integers."""
_IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf")
_REFUSED = ("not", "if", "then", "else", "$dynamicRef", "$recursiveRef")


def to_enforceable(schema: object, work: SchemaWork | None = None) -> dict[str, Any]:
    """Returns a schema that grammars enforce, and whose answers are valid for `schema`.

    Its only references are to its own `$defs`. `work`: that of the request's schemas so far. Raises SchemaError.
    """
    try:
        return _Translation(schema, work or SchemaWork()).result()
    except RecursionError:
        raise SchemaError("", "is nested too deep") from None


class _Translation:
    """The translation of one schema."""

    def __init__(self, root: object, work: SchemaWork) -> None:
        self._root = root
        self._work = work
        self._references = References(root, work)
        self._names: dict[str, str] = {}  # names of the definitions, by reference
        self._waiting: list[tuple[str, Any]] = []  # references, and the schemas they refer to

    def result(self) -> dict[str, Any]:
        found = self._translate(self._root, "")
        definitions = {}
        while self._waiting:
            reference, schema = self._waiting.pop()
            definitions[self._names[reference]] = self._translate(schema, reference[1:].replace("/", ".")[:200])
        self._check_ends(found, definitions)
        return found | {"$defs": definitions} if definitions else found

    def _translate(self, schema: Any, path: str, depth: int = 1) -> dict[str, Any]:
        self._work.begin_schema()
        if depth > MAX_DEPTH:
            raise SchemaError("", f"is more than {MAX_DEPTH} schemas deep")
        if schema is False:
            raise SchemaError(path, "is false: it allows no value")
        if schema is True:
            return {}
        if not isinstance(schema, Mapping):
            raise SchemaError(path, "should be a schema: an object, true or false")
        for keyword in _REFUSED:
            if keyword in schema:
                raise SchemaError(at(path, keyword), "cannot be enforced: list the allowed values instead")
        if path and "$id" in schema:
            raise SchemaError(at(path, "$id"), "cannot be followed: leave it out, and refer to places by #/")
        self._check_types(schema, path)
        if any(keyword in schema for keyword in _IN_PLACE):
            return self._in_place(schema, path, depth)
        if "const" in schema or "enum" in schema:
            return self._listed(schema, path)
        types = self._types(schema, path)
        options = [self._of_type(type_, schema, path, depth) for type_ in types]
        return {} if not options else options[0] if len(options) == 1 else {"anyOf": options}

    def _in_place(self, schema: Mapping[str, Any], path: str, depth: int) -> dict[str, Any]:
        """Translates a schema with a keyword such as `$ref` or `anyOf`, which has to be its only keyword."""
        keyword, *others = [keyword for keyword in _IN_PLACE if keyword in schema]
        keywords = {"const", "enum"}.union(*_KEYWORDS.values())
        for other in [*others, *(name for name in schema if name in keywords)]:
            raise SchemaError(
                at(path, other), f"cannot be enforced together with {keyword}: merge the two into one schema"
            )
        if "type" in schema:
            rest = {name: value for name, value in schema.items() if name != "type"}
            allowed = types_of({"type": schema["type"]}, self._references)
            if not all(
                has in allowed or (has == "integer" and "number" in allowed) for has in types_of(rest, self._references)
            ):
                raise SchemaError(
                    at(path, "type"), f"cannot be enforced together with {keyword}: put it into {keyword}"
                )
        place = at(path, keyword)
        if keyword == "$ref":
            return {"$ref": f"#/$defs/{self._definition(schema['$ref'], place)}"}
        options = schema[keyword]
        if not isinstance(options, list) or not options:
            raise SchemaError(place, "should be a list of schemas")
        if keyword == "allOf":
            if len(options) > 1:
                raise SchemaError(place, "cannot be enforced with several schemas: merge them into one")
            return self._translate(options[0], at(place, 0), depth + 1)
        if keyword == "oneOf":
            self._check_apart(options, place)
        kept = [(index, option) for index, option in enumerate(options) if option is not False]
        if not kept:
            raise SchemaError(place, "allows no value")
        return {"anyOf": [self._translate(option, at(place, index), depth + 1) for index, option in kept]}

    def _check_apart(self, options: list[Any], place: str) -> None:
        for second in range(len(options)):
            for first in range(second):
                if not are_apart(options[first], options[second], self._references):
                    raise SchemaError(
                        place,
                        f"cannot be enforced, as a value may be valid for both {first} and {second}: use anyOf, or"
                        " require a property of each that has a value of its own",
                    )

    def _check_types(self, schema: Mapping[str, Any], path: str) -> None:
        given = schema.get("type", "string")
        names = given if isinstance(given, list) else [given]
        if not names or not all(isinstance(name, str) and name in TYPES for name in names):
            raise SchemaError(at(path, "type"), f"should be one or more of {', '.join(TYPES)}")

    def _types(self, schema: Mapping[str, Any], path: str) -> list[str]:
        """Returns the types that a schema names, or else those that its keywords apply to."""
        if "type" not in schema:
            return [type_ for type_, keywords in _KEYWORDS.items() if keywords & schema.keys()]
        names = list(dict.fromkeys([schema["type"]] if isinstance(schema["type"], str) else schema["type"]))
        return [name for name in names if name != "integer" or "number" not in names]

    def _of_type(self, type_: str, schema: Mapping[str, Any], path: str, depth: int) -> dict[str, Any]:
        def translate(inner: Any, place: str) -> dict[str, Any]:
            return self._translate(inner, place, depth + 1)

        match type_:
            case "string":
                return string(schema, path)
            case "integer":
                return integer(schema, path)
            case "number":
                return number(schema, path)
            case "array":
                return array(schema, path, translate, self._references)
            case "object":
                return object_(schema, path, translate, self._references)
        return {"type": type_}

    def _listed(self, schema: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Translates a schema that lists its values."""
        keyword = "enum" if "enum" in schema else "const"
        if keyword == "enum" and not isinstance(schema["enum"], list):
            raise SchemaError(at(path, "enum"), "should be a list of values")
        for other in (name for name in schema if any(name in keywords for keywords in _KEYWORDS.values())):
            raise SchemaError(at(path, other), f"cannot be enforced together with {keyword}: leave out what it forbids")
        values = finite_values(schema, self._references)
        if not values:
            raise SchemaError(at(path, keyword), "allows no value")
        if not all(map(has_exact_numbers, values)):
            raise SchemaError(at(path, keyword), "has a number of more than 64 bits, which cannot be enforced")
        distinct = list({key_of(value): value for value in values}.values())
        return {"const": distinct[0]} if keyword == "const" else {"enum": distinct}

    def _definition(self, reference: Any, path: str) -> str:
        """Returns the name of the definition that `reference` becomes."""
        schema = self._references.look_up(reference, path)
        if reference not in self._names:
            if len(self._names) >= MAX_DEFINITIONS:
                raise SchemaError("", f"refers to more than {MAX_DEFINITIONS} definitions")
            self._names[reference] = f"d{len(self._names)}"
            self._waiting.append((reference, schema))
        return self._names[reference]

    def _check_ends(self, schema: Mapping[str, Any], definitions: Mapping[str, Mapping[str, Any]]) -> None:
        """Raises SchemaError if `schema` has no finite value, or a definition just refers to itself."""
        ending: set[str] = set()
        while True:
            more = {name for name, inner in definitions.items() if name not in ending and _can_end(inner, ending)}
            if not more:
                break
            ending |= more
        if not _can_end(schema, ending):
            raise SchemaError("", "has no finite value: its definitions require each other")
        references = {name: reference for reference, name in self._names.items()}
        for name in definitions:
            if _stands_for(name, definitions[name], definitions, set()):
                raise SchemaError(references[name][1:].replace("/", "."), "refers to itself without anything between")


def _can_end(schema: Mapping[str, Any], ending: set[str]) -> bool:
    """Returns whether `schema` allows a finite value, if the definitions `ending` do."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2] in ending
    if "anyOf" in schema:
        return any(_can_end(option, ending) for option in schema["anyOf"])
    needed = [*schema.get("prefixItems", ()), *(schema["properties"][name] for name in schema.get("required", ()))]
    if schema.get("minItems", 0) > len(schema.get("prefixItems", ())):
        needed.append(schema["items"])
    return all(_can_end(inner, ending) for inner in needed)


def _stands_for(name: str, schema: Mapping[str, Any], definitions: Mapping[str, Any], seen: set[str]) -> bool:
    """Returns whether `schema` leads to the definition `name` through `$ref` and `anyOf` only."""
    if "$ref" in schema:
        other = str(schema["$ref"]).rpartition("/")[2]
        if other == name or other in seen:
            return other == name
        seen.add(other)
        return _stands_for(name, definitions[other], definitions, seen)
    return any(_stands_for(name, option, definitions, seen) for option in schema.get("anyOf", ()))
