"""Writes the rules of the JSON texts that a schema allows.

The schemas are those that the router writes: `services/router/structured` refuses what cannot be enforced. Properties
come in the order of the schema, then others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.grammars.numbers import INTEGER, NUMBER, integers, numbers
from cluster.grammars.rules import BLANKS, Part, Rules, invalid_grammar, literal, one_of, slashed

Schema = Mapping[str, Any]

# The two escapes of a surrogate pair are one character; single surrogates are none.
_ESCAPE = (
    r'\\(?:["\\/bfnrt]|u(?:[0-9a-cefA-CEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}'
    r"|[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))"
)
_UNESCAPED = r'[^"\\\x00-\x1f\x7f]'
_CHARACTER = f"(?:{_UNESCAPED}|{_ESCAPE})"
_CHUNK = 256  # characters of a longer string that are counted as one
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_MAX_COUNTED = 4096  # states of an object that counts its properties

_KEYWORDS = {
    "string": {"pattern", "minLength", "maxLength"},
    "integer": {"minimum", "maximum"},
    "number": {*_BOUNDS},
    "array": {"prefixItems", "items", "minItems", "maxItems"},
    "object": {
        *("properties", "required", "additionalProperties", "propertyNames", "minProperties", "maxProperties"),
    },
    "boolean": set[str](),
    "null": set[str](),
}


class JsonRules:
    """Adds the rules of one schema to `rules`. References are to the `$defs` of the innermost schema that has some."""

    def __init__(self, rules: Rules, schema: Schema) -> None:
        self._rules = rules
        self._schema = schema
        self._definitions: dict[str, str] = {}  # names of rules by reference
        self._any = ""

    def write(self) -> Part:
        """Returns the start. Raises InvalidRequestError if the schema is unsupported, too large or allows no value."""
        found = self._value({name: inner for name, inner in self._schema.items() if name != "$defs"})
        return Part(found, is_expression=False)

    def _value(self, schema: Schema | bool) -> str:
        if schema is True or not schema:
            return self._any_value()
        assert not isinstance(schema, bool)
        if "$defs" in schema:
            return JsonRules(self._rules, schema).write().body
        if "$ref" in schema:
            return self._definition(str(schema["$ref"]))
        if "anyOf" in schema:
            return self._rules.add(one_of(map(self._value, schema["anyOf"])))
        if "const" in schema or "enum" in schema:
            return self._rules.add(self._listed(schema["enum"] if "enum" in schema else [schema["const"]]))
        kind = schema.get("type")
        for keyword in schema.keys() - {"type"}:
            if keyword not in _KEYWORDS.get(str(kind), ()):
                raise invalid_grammar(f"{keyword} is not supported in a schema of type {kind}")
        match kind:
            case "string":
                return self._string(schema)
            case "integer":
                return self._rules.terminal(slashed(_integer(schema)))
            case "number":
                return self._rules.terminal(slashed(_number(schema)))
            case "array":
                return self._array(schema)
            case "object":
                return self._object(schema)
            case "boolean":
                return self._rules.terminal("/true|false/")
            case "null":
                return '"null"'
        raise invalid_grammar(f"a schema has the unknown type {kind}")

    def _string(self, schema: Schema) -> str:
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if "pattern" in schema or max(least, most or 0) <= _CHUNK:
            return self._rules.terminal(self._string_expression(schema))
        # An expression would have a state for each character. All long strings share the chunks that count them.
        first, begin = divmod(least, _CHUNK)
        last, end = (None, None) if most is None else divmod(most, _CHUNK)
        if first == last:
            return self._chunks(first, first, begin, end)
        options = [self._chunks(first, first, begin, _CHUNK - 1)]
        if last is None or last > first + 1:
            options.append(self._chunks(first + 1, None if last is None else last - 1, 0, _CHUNK - 1))
        if last is not None:
            options.append(self._chunks(last, last, 0, end))
        return self._rules.add(one_of(options))

    def _string_expression(self, schema: Schema) -> str:
        """Returns the expression of a string."""
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if "pattern" not in schema:
            length = _times(least, most) if least or most is not None else "*"
            return slashed(f'"{_CHARACTER}{length}"')
        expression = self._rules.expression(f'"(?:{schema["pattern"]})"').body
        if not least and most is None:
            return expression
        length = f'"(?s:.){_times(least, most)}"'
        return f"{expression} & {slashed(length)}"

    def _chunks(self, least: int, most: int | None, begin: int, end: int | None) -> str:
        """Returns the rule of a string of `least` to `most` chunks, and `begin` to `end` characters after them."""
        # The first chunk has the quote: the text of another kind of string may begin alike.
        chunk = f"{_CHARACTER}{{{_CHUNK}}}"
        first, more = (self._rules.terminal(slashed(text)) for text in (f'"{chunk}', chunk))
        rest = f'{_CHARACTER}{_times(begin, end)}"'
        options = [] if least else [self._rules.terminal(slashed(f'"{rest}'))]
        if most != 0:
            others = _times(max(0, least - 1), None if most is None else most - 1)
            following = "" if others == "{0,0}" else f"({more}){others}"
            options.append(f"{first} {following} {self._rules.terminal(slashed(rest))}")
        return self._rules.add(one_of(options))

    def _any_value(self) -> str:
        if not self._any:
            self._any = self._rules.new_name()
            kinds = ("string", "number", "array", "object", "boolean", "null")
            self._rules.add(one_of(self._value({"type": kind}) for kind in kinds), self._any)
        return self._any

    def _definition(self, reference: str) -> str:
        if reference not in self._definitions:
            self._definitions[reference] = name = self._rules.new_name()
            self._rules.add(self._value(self._schema["$defs"][reference.removeprefix("#/$defs/")]), name)
        return self._definitions[reference]

    def _listed(self, values: Sequence[Any]) -> str:
        plain = [literal(_json(value)) for value in values if not isinstance(value, dict | list)]
        containers = [self._constant(value) for value in values if isinstance(value, dict | list)]
        return one_of([*([self._rules.terminal(one_of(plain))] if plain else []), *containers])

    def _constant(self, value: dict[str, Any] | list[Any]) -> str:
        if isinstance(value, list):
            items = [{"const": item} for item in value]
            return self._value({"type": "array", "prefixItems": items, "minItems": len(items), "items": False})
        properties = {name: {"const": inner} for name, inner in value.items()}
        closed = {"properties": properties, "required": list(value), "additionalProperties": False}
        return self._value({"type": "object", **closed})

    def _array(self, schema: Schema) -> str:
        first = [self._value(item) for item in schema.get("prefixItems", ())]
        least, most, items = schema.get("minItems", 0), schema.get("maxItems"), schema.get("items", True)
        end = '""'
        if items is not False and most != len(first):
            item = self._value(items)
            if first:
                end = self._several(item, max(0, least - len(first)), None if most is None else most - len(first))
            else:
                end = self._list(item, least, most)
        for index in reversed(range(len(first))):
            some = f"{self._comma if index else ''} {first[index]} {end}"
            end = self._rules.add(f"({some})?" if index >= least else some)
        return self._within("[", end, "]")

    def _object(self, schema: Schema) -> str:
        required = set(schema.get("required", ()))
        properties = [
            (f"{literal(_json(name))} {self._colon} {self._value(inner)}", name in required)
            for name, inner in schema.get("properties", {}).items()
        ]
        least, most = schema.get("minProperties", 0), schema.get("maxProperties")
        least = 0 if least <= sum(is_required for _, is_required in properties) else least
        return self._within("{", self._properties(properties, self._other_property(schema), least, most), "}")

    def _properties(
        self, properties: Sequence[tuple[str, bool]], others: str | None, least: int, most: int | None
    ) -> str:
        """Returns the rule of `properties`, each with whether it is required, and then `others`."""
        num_counted = max(1, least) if most is None else most
        if num_counted > 1 and len(properties) * min(num_counted, len(properties)) > _MAX_COUNTED:
            raise invalid_grammar(f"it has to count {num_counted} of {len(properties)} properties")
        # Writes rules from the last property to the first, as recursion could exceed Python's limit. `some[n]` is the
        # rule of at least one property from this one on, if n come before it; None if that is impossible. Numbers above
        # `num_counted` are treated alike.
        counts = range(min(len(properties), num_counted) + 1)
        some = [
            None
            if others is None or most == count
            else self._list(others, max(1, least - count), None if most is None else most - count)
            for count in counts
        ]
        can_end = True
        for property_, is_required in reversed(properties):
            rest = [
                self._any_of([rule and f"{self._comma} {rule}"], can_end and count >= least)
                for count, rule in zip(counts, some, strict=True)
            ]
            after = [None if count == most else rest[min(count + 1, counts[-1])] for count in counts]
            some = [
                self._any_of([following and f"{property_} {following}", None if is_required else skipped], False)
                for following, skipped in zip(after, some, strict=True)
            ]
            can_end = can_end and not is_required
        found = self._any_of(some[:1], can_end and not least)
        if found is None:
            raise invalid_grammar("a schema allows no value")
        return found

    def _any_of(self, options: Sequence[str | None], can_be_empty: bool) -> str | None:
        """Returns the rule of one of those `options` that are possible; None if there is none."""
        possible = [option for option in options if option is not None]
        if can_be_empty:
            possible.append('""')
        return self._rules.add(one_of(possible)) if possible else None

    def _list(self, member: str, least: int, most: int | None) -> str:
        if most == 0:
            return '""'
        more = self._several(member, max(0, least - 1), None if most is None else most - 1)
        return self._rules.add(f"{member} {more}" if least else f"({member} {more})?")

    def _several(self, member: str, least: int, most: int | None) -> str:
        return '""' if most == 0 else self._rules.add(f"({self._comma} {member}){_times(least, most)}")

    def _other_property(self, schema: Schema) -> str | None:
        """Returns the rule of a property that `properties` does not have; None: there are none."""
        others, names = schema.get("additionalProperties", True), schema.get("properties", ())
        key = self._string_expression(schema.get("propertyNames", {}))
        if names:
            # Without escapes: otherwise a key might be a name in another spelling.
            key = slashed(f'"{_UNESCAPED}*"') + f" & ~({one_of(literal(_json(name)) for name in names)})"
        if others is False:
            return None
        return self._rules.add(f"{self._rules.terminal(key)} {self._colon} {self._value(others)}")

    @property
    def _colon(self) -> str:
        return self._rules.terminal(slashed(f"{BLANKS}:{BLANKS}"))

    @property
    def _comma(self) -> str:
        return self._rules.terminal(slashed(f"{BLANKS},{BLANKS}"))

    def _within(self, opening: str, members: str, closing: str) -> str:
        begin, end = (self._rules.terminal(slashed(text)) for text in (f"\\{opening}{BLANKS}", f"{BLANKS}\\{closing}"))
        return self._rules.add(f"{begin} {members} {end}")


def _times(least: int, most: int | None) -> str:
    return f"{{{least},{'' if most is None else most}}}"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _integer(schema: Schema) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    return INTEGER if low is None and high is None else integers(low, high)


def _number(schema: Schema) -> str:
    bounds = {keyword: schema[keyword] for keyword in _BOUNDS if keyword in schema}
    return numbers(bounds) if bounds else NUMBER
