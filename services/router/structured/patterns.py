"""Rewrites regular expressions of schemas into ones that grammars follow exactly.

As JSON Schema has it, an expression matches anywhere in the string, unless `^` and `$` bind it. Characters that JSON
escapes (quotes, backslashes, control characters) are excluded, as grammars write strings without escapes. Classes of
characters such as `\\d` mean their ASCII characters, a subset of what validators of any dialect accept.
"""

from __future__ import annotations

import re
from collections import abc
from dataclasses import dataclass
from functools import lru_cache
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from cluster.grammars.rules import MAX_OPERATORS, num_operators
from services.router.structured.expressions import (
    NOTHING,
    PLAIN,
    Alternatives,
    Class,
    Concatenation,
    Node,
    Ranges,
    Repeat,
    complement,
    intersection,
    ranges,
    simplified,
    texts_of,
    with_one_of,
    written,
)

MAX_REPEATS = 10_000
_MAX_CHARACTERS = 4096
_MAX_CHARACTERS_WITH_LOOK_AHEAD = 40  # the rewritten expression grows with their square

Items = abc.Sequence[Any]  # parsed items, as Python's regex parser returns them
_UNBOUNDED = int(ops.MAXREPEAT)
_ASCII = ((0, 0x7F),)
_ANY_TEXT, _EMPTY = Repeat(Class(PLAIN), 0, None), Concatenation(())
_GROUPS = (ops.BRANCH, ops.SUBPATTERN)


class PatternError(ValueError):
    """An expression that cannot be rewritten, with the reason."""


@dataclass(frozen=True)
class Pattern:
    """A rewritten expression."""

    node: Node

    @property
    def text(self) -> str:
        return written(self.node)

    def texts(self) -> tuple[str, ...] | None:
        """Returns all texts; None if there are more than 64."""
        return texts_of(self.node)


_CATEGORIES: dict[Any, Ranges] = {
    ops.CATEGORY_DIGIT: ranges((48, 57)),
    ops.CATEGORY_WORD: ranges((48, 57), (65, 90), (95, 95), (97, 122)),
    ops.CATEGORY_SPACE: ranges((9, 13), (28, 32)),
}
_NEGATED: dict[Any, Any] = {
    ops.CATEGORY_NOT_DIGIT: ops.CATEGORY_DIGIT,
    ops.CATEGORY_NOT_WORD: ops.CATEGORY_WORD,
    ops.CATEGORY_NOT_SPACE: ops.CATEGORY_SPACE,
}


@lru_cache(maxsize=256)
def rewrite(pattern: str, *, is_search: bool = True) -> Pattern:
    """Rewrites `pattern` so that grammars follow it exactly. Raises PatternError if that is impossible.

    `is_search`: whether other text may come before a missing `^` and after a missing `$`.
    """
    if len(pattern) > (_MAX_CHARACTERS_WITH_LOOK_AHEAD if "(?!" in pattern else _MAX_CHARACTERS):
        raise PatternError("is too long")
    try:
        parsed = parser.parse(pattern)
    except (re.error, OverflowError, RecursionError, ValueError) as error:
        raise PatternError(f"is not a valid regular expression ({error})"[:160]) from error
    if parsed.state.flags & ~re.UNICODE:
        raise PatternError("has flags, which cannot be enforced")
    beyond = _ANY_TEXT if is_search else _EMPTY
    node = simplified(_sequence(list(parsed), before=beyond, after=beyond))
    if node == NOTHING:
        raise PatternError("has no text that a JSON string can spell without escapes")
    if num_operators(written(node)) > MAX_OPERATORS:
        raise PatternError(f"has more than {MAX_OPERATORS} classes, repetitions and groups")
    return Pattern(node)


def _sequence(items: Items, *, before: Node | None, after: Node | None) -> Node:
    """Returns the sequence of `items`.

    `before`: if it begins the whole expression, what may come before it without an anchor; `after`: likewise.
    """
    items = list(items)
    while before is not None and items and items[0] == (ops.AT, ops.AT_BEGINNING):
        items.pop(0)
        before = _EMPTY
    while after is not None and items and items[-1] == (ops.AT, ops.AT_END):
        items.pop()
        after = _EMPTY
    if before is not None and items and items[0][0] is ops.ASSERT_NOT:
        return _except(items[0][1], _sequence(items[1:], before=None, after=after))
    last = len(items) - 1
    parts = [
        _node(op, value, before=before if index == 0 else None, after=after if index == last else None)
        for index, (op, value) in enumerate(items)
    ]
    # Groups have added them to each of their alternatives, which may have anchors of their own.
    if before is not None and not (items and items[0][0] in _GROUPS):
        parts.insert(0, before)
    if after is not None and not (items and items[-1][0] in _GROUPS):
        parts.append(after)
    return parts[0] if len(parts) == 1 else Concatenation(tuple(parts))


def _node(op: Any, value: Any, *, before: Node | None, after: Node | None) -> Node:
    match op:
        case ops.LITERAL:
            return Class(ranges((value, value)))
        case ops.NOT_LITERAL:
            return Class(complement(ranges((value, value))))
        case ops.ANY:
            return Class(PLAIN)
        case ops.IN:
            return Class(_class(value))
        case ops.BRANCH:
            return Alternatives(tuple(_sequence(option, before=before, after=after) for option in value[1]))
        case ops.SUBPATTERN if not value[1] and not value[2]:
            return _sequence(value[3], before=before, after=after)
        case ops.MAX_REPEAT | ops.MIN_REPEAT:
            least, most, inner = value
            bounds = (least, None if most == _UNBOUNDED else most)
            if max(bounds[0], bounds[1] or 0) > MAX_REPEATS:
                raise PatternError(f"has a repetition of more than {MAX_REPEATS}")
            return Repeat(_sequence(inner, before=None, after=None), *bounds)
    raise PatternError(f"has {_NAMES.get(op, str(op).lower())}, which cannot be enforced")


_NAMES = {
    ops.ASSERT: "a look-ahead or look-behind",
    ops.ASSERT_NOT: "a negative look-ahead or look-behind",
    ops.AT: "an anchor or word boundary within it",
    ops.GROUPREF: "a reference to a group",
}


def _class(items: Items) -> Ranges:
    is_negated = bool(items) and items[0][0] is ops.NEGATE
    found: Ranges = ()
    for op, value in items[1:] if is_negated else items:
        match op:
            case ops.LITERAL:
                part = ranges((value, value))
            case ops.RANGE:
                part = ranges(value)
            case ops.CATEGORY if value in _CATEGORIES:
                # Characters on which the dialects disagree, which are all beyond ASCII, must not be in the class.
                part = ranges(*_CATEGORIES[value], (0x80, 0x10FFFF)) if is_negated else _CATEGORIES[value]
            case ops.CATEGORY if value in _NEGATED:
                beyond = () if not is_negated else ((0x80, 0x10FFFF),)
                part = ranges(*intersection(_ASCII, complement(_CATEGORIES[_NEGATED[value]])), *beyond)
            case _:
                raise PatternError("has a class of characters that cannot be enforced")
        found = ranges(*found, *part)
    return complement(found) if is_negated else found


def _except(assertion: Any, node: Node) -> Node:
    """Returns `node` without the texts that the negative look-ahead `assertion` forbids.

    Raises PatternError unless it forbids texts of certain characters, such as `(?!^[-+.]*$)` in pydantic's Decimal.
    """
    direction, items = assertion
    items = [item for item in items if item[0] is not ops.AT]
    if direction == 1 and len(items) == 1 and items[0][0] is ops.MAX_REPEAT:
        least, most, inner = items[0][1]
        ends = assertion[1][-1] == (ops.AT, ops.AT_END)
        if (least, most, len(inner)) == (0, _UNBOUNDED, 1) and ends:
            characters = _node(*inner[0], before=None, after=None)
            if isinstance(characters, Class):
                return with_one_of(complement(characters.allowed), node)
    raise PatternError("has a negative look-ahead, which cannot be enforced: describe the text positively")
