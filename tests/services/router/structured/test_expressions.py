"""An expression is limited to a length: every text of what is left has that length, and is one of the expression."""

from __future__ import annotations

import itertools
import random
import re

import pytest

from services.router.structured import expressions
from services.router.structured.enforceable import to_enforceable
from services.router.structured.expressions import (
    NOTHING,
    Alternatives,
    Class,
    Concatenation,
    Node,
    Repeat,
    simplified,
    with_length,
    written,
)

NUM_EXPRESSIONS = 2000
MAX_LOST = 0.01  # share of the lengths at which no text is found, though there is one


def draw(rng: random.Random, depth: int) -> Node:
    kind = rng.random() if depth else 0.0
    if kind < 0.3:
        return Class(((97, 97 + rng.randrange(2)),))
    if kind < 0.55:
        return Concatenation(tuple(draw(rng, depth - 1) for _ in range(rng.randint(0, 3))))
    if kind < 0.75:
        return Alternatives(tuple(draw(rng, depth - 1) for _ in range(rng.randint(1, 3))))
    least = rng.randrange(3)
    return Repeat(draw(rng, depth - 1), least, rng.choice((None, least, least + 2)))


def text_of(rng: random.Random, node: Node) -> str:
    match node:
        case Class(allowed):
            return chr(rng.randint(*rng.choice(allowed)))
        case Concatenation(parts):
            return "".join(text_of(rng, part) for part in parts)
        case Alternatives(options):
            return text_of(rng, rng.choice(options))
        case Repeat(inner, least, most):
            last = least + 4 if most is None else most
            return "".join(text_of(rng, inner) for _ in range(rng.choice((least, last, rng.randint(least, last)))))


def has_text(expression: re.Pattern[str], least: int, most: int) -> bool:
    texts = ("".join(text) for length in range(least, most + 1) for text in itertools.product("ab", repeat=length))
    return any(expression.fullmatch(text) for text in texts)


def test_random_expressions() -> None:
    rng = random.Random(3)
    num_lost = num_found = 0
    for _ in range(NUM_EXPRESSIONS):
        node = simplified(draw(rng, 3))
        if node == NOTHING:
            continue
        least = rng.randrange(5)
        most = rng.choice((None, least + rng.randrange(5)))
        expression, limited = re.compile(written(node)), with_length(node, least, most)
        if limited == NOTHING:
            num_lost += has_text(expression, least, least + 4 if most is None else most)
            continue
        num_found += 1
        for _ in range(4):
            text = text_of(rng, limited)
            assert expression.fullmatch(text), (written(node), written(limited), text)
            assert least <= len(text), (written(node), written(limited), text)
            assert most is None or len(text) <= most, (written(node), written(limited), text)
    assert num_found > NUM_EXPRESSIONS / 4
    assert num_lost < MAX_LOST * NUM_EXPRESSIONS


def test_deep_expressions_take_no_longer_with_a_length() -> None:
    """The time was proportional to size times depth, for each object of a schema."""
    names = {"type": "string", "pattern": "(?:" * 60 + "a|bb" + "|xcy)z" * 60, "maxLength": 62}
    properties = {f"p{i}": {"type": "object", "propertyNames": {"$ref": "#/$defs/a"}} for i in range(20)}
    visited = 0
    expected = expressions._at_most

    def count(node: Node, most: int) -> Node:
        nonlocal visited
        visited += 1
        return expected(node, most)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expressions, "_at_most", count)
        to_enforceable({"type": "object", "properties": properties, "$defs": {"a": names}})
    assert 0 < visited < 1000
