"""Regular expressions as trees of character classes, and operations on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

Ranges = tuple[tuple[int, int], ...]  # ranges of code points, sorted and disjoint

MAX_TEXTS = 64


def ranges(*parts: tuple[int, int]) -> Ranges:
    """Returns the union of `parts`."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(parts):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(merged)


@lru_cache(maxsize=1024)
def complement(inner: Ranges) -> Ranges:
    """Returns all characters but those of `inner`."""
    begin, found = 0, []
    for low, high in inner:
        if low > begin:
            found.append((begin, low - 1))
        begin = high + 1
    if begin <= 0x10FFFF:
        found.append((begin, 0x10FFFF))
    return tuple(found)


@lru_cache(maxsize=1024)
def intersection(one: Ranges, other: Ranges) -> Ranges:
    """Returns the characters that `one` and `other` share."""
    return complement(ranges(*complement(one), *complement(other)))


# Characters that a JSON string may contain without an escape; no surrogates, which UTF-8 cannot encode.
PLAIN = ranges((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7E), (0xA0, 0xD7FF), (0xE000, 0x10FFFF))


# Expressions: a class of characters, a sequence, alternatives, a repetition.


class _Node:
    @cached_property
    def widths(self) -> tuple[int, int | None]:
        """The lengths in characters of the shortest and the longest text; None: unbounded."""
        match self:
            case Class():
                return 1, 1
            case Concatenation(parts):
                return _sum(part.widths for part in parts)
            case Alternatives(options):
                longest = [option.widths[1] for option in options if option.widths[1] is not None]
                shortest = min(option.widths[0] for option in options)
                return shortest, None if len(longest) < len(options) else max(longest)
            case Repeat(inner, least, most):
                shortest, most_of_one = inner.widths
                return shortest * least, None if most_of_one is None or most is None else most_of_one * most
        raise AssertionError(self)


@dataclass(frozen=True)
class Class(_Node):
    allowed: Ranges


@dataclass(frozen=True)
class Concatenation(_Node):
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Alternatives(_Node):
    options: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat(_Node):
    inner: Node
    least: int
    most: int | None


Node = Class | Concatenation | Alternatives | Repeat

EMPTY = Concatenation(())
NOTHING = Alternatives(())  # matches no text, not even the empty one


def with_one_of(needed: Ranges, node: Node) -> Node:
    """Returns `node` limited to texts that have at least one character of `needed`."""
    match node:
        case Class(allowed):
            return Class(intersection(allowed, needed))
        case Alternatives(options):
            return Alternatives(tuple(with_one_of(needed, option) for option in options))
        case Concatenation(parts):
            return Alternatives(
                tuple(
                    Concatenation((*parts[:index], with_one_of(needed, part), *parts[index + 1 :]))
                    for index, part in enumerate(parts)
                )
            )
        case Repeat(inner, least, most):
            # The repetition with a character of `needed` comes first; in `inner*`, others may precede it.
            if most == 0:
                return NOTHING
            rest = Repeat(inner, max(0, least - 1), None if most is None else most - 1)
            one = with_one_of(needed, inner)
            if most is None and least == 0 and simplified(one) != inner:
                return Concatenation((Repeat(inner, 0, None), one, rest))
            return Concatenation((one, rest))


def simplified(node: Node) -> Node:
    """Returns `node` without characters that strings cannot contain; `NOTHING` if no text is left."""
    match node:
        case Class(allowed):
            plain = intersection(allowed, PLAIN)
            return Class(plain) if plain else NOTHING
        case Concatenation(parts):
            kept = tuple(simplified(part) for part in parts)
            if NOTHING in kept:
                return NOTHING
            kept = tuple(part for part in kept if part != EMPTY)
            return kept[0] if len(kept) == 1 else Concatenation(kept)
        case Alternatives(options):
            kept = tuple(dict.fromkeys(simplified(option) for option in options))
            kept = tuple(option for option in kept if option != NOTHING)
            return kept[0] if len(kept) == 1 else Alternatives(kept)
        case Repeat(inner, least, most):
            kept_inner = simplified(inner)
            if kept_inner in (NOTHING, EMPTY) or most == 0:
                return NOTHING if kept_inner == NOTHING and least else EMPTY
            return Repeat(kept_inner, least, most)


def _sum(each: Iterable[tuple[int, int | None]]) -> tuple[int, int | None]:
    shortest = 0
    total: int | None = 0
    for least, most in each:
        shortest += least
        total = None if total is None or most is None else total + most
    return shortest, total


def texts_of(node: Node) -> tuple[str, ...] | None:
    """Returns all texts that `node` matches; None if there are more than `MAX_TEXTS`."""
    found: Iterable[str] | None = None
    match node:
        case Class(allowed):
            if sum(high - low + 1 for low, high in allowed) <= MAX_TEXTS:
                found = (chr(point) for low, high in allowed for point in range(low, high + 1))
        case Concatenation(parts):
            found = _joined([texts_of(part) for part in parts])
        case Alternatives(options):
            texts = [texts_of(option) for option in options]
            if None not in texts:
                found = (text for some in texts if some for text in some)
        case Repeat(inner, least, most):
            if most is not None and most <= MAX_TEXTS:
                once = texts_of(inner)
                counts = [_joined([once] * number) for number in range(least, most + 1)]
                if None not in counts:
                    found = (text for some in counts if some for text in some)
    distinct = None if found is None else tuple(dict.fromkeys(found))
    return None if distinct is None or len(distinct) > MAX_TEXTS else distinct


def _joined(parts: Sequence[tuple[str, ...] | None]) -> tuple[str, ...] | None:
    """Returns all concatenations of one text of each part; None if there are too many."""
    found: tuple[str, ...] = ("",)
    for part in parts:
        if part is None:
            return None
        found = tuple(dict.fromkeys(before + text for before in found for text in part))
        if len(found) > MAX_TEXTS:
            return None
    return found


def written(node: Node) -> str:
    """Returns the regular expression of `node`."""
    match node:
        case Class(allowed):
            if len(allowed) == 1 and allowed[0][0] == allowed[0][1]:
                return _escaped(allowed[0][0], "\\.^$*+?{}[]|()/-")
            return "[" + "".join(map(_range, allowed)) + "]"
        case Concatenation(parts):
            return "".join(map(written, parts))
        case Alternatives(options):
            return "(?:" + "|".join(map(written, options)) + ")"
        case Repeat(inner, least, most):
            text = written(inner)
            return (text if isinstance(inner, Class) else f"(?:{text})") + count(least, most)


def count(least: int, most: int | None) -> str:
    """Returns the suffix for `least` to `most` repetitions, such as "*" or "{2,5}"."""
    match least, most:
        case 0, None:
            return "*"
        case 1, None:
            return "+"
        case 0, 1:
            return "?"
    if least == most:
        return f"{{{least}}}"
    return f"{{{least},{'' if most is None else most}}}"


def _range(bounds: tuple[int, int]) -> str:
    low, high = (_escaped(point, "\\]^-[") for point in bounds)
    return low if low == high else f"{low}-{high}"


def _escaped(point: int, special: str) -> str:
    return f"\\{chr(point)}" if chr(point) in special else chr(point)
