"""Writes rules in llguidance's form of Lark: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from cluster.constraints import MAX_WHITESPACE
from cluster.errors import InvalidRequestError

BLANKS = f"[ \\n\\r\\t]{{0,{MAX_WHITESPACE}}}"

# llguidance takes 0.3 s for an expression of 1,000 operators, in proportion to the square, and 0.05 ms for a rule.
MAX_OPERATORS = 1000  # of an expression
_MAX_ALL_OPERATORS = 5000  # of all expressions of a grammar
_MAX_RULES = 20_000


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a rule: an expression, or something that is parsed."""

    body: str
    is_expression: bool = True
    size: int = 1  # operators of an expression, after all references are replaced


class Rules:
    """The rules of one grammar.

    Rules are parsed. Terminals are matched by a lexer, which takes the longest text and does not go back. So adjacent
    expressions are joined, up to a size: no text is lost between them.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._terminals: dict[str, str] = {}  # names by expression
        self._sizes: dict[str, int] = {}  # of expressions of clients

    def new_name(self) -> str:
        """Returns a name for `add`, so that a rule can refer to one that is not written yet."""
        if len(self._lines) == _MAX_RULES:
            raise invalid_grammar("it is too large")
        self._lines.append("")
        return f"r{len(self._lines) - 1}"

    def add(self, body: str, name: str | None = None, attributes: str = "") -> str:
        """Adds a rule. Returns its name."""
        name = name or self.new_name()
        self._lines[int(name[1:])] = f"{name}{attributes}: {body}"
        return name

    def terminal(self, expression: str) -> str:
        """Returns the name of the terminal with `expression`: expressions between slashes, `&`, `~`, `|`, `(`, `)`."""
        return self._terminals.setdefault(expression, f"T{len(self._terminals)}")

    def expression(self, text: str) -> Part:
        """Returns the part of a client's regular expression. Raises InvalidRequestError if it is too large."""
        size = num_operators(text)
        self._sizes[text] = size
        if size > MAX_OPERATORS or sum(self._sizes.values()) > _MAX_ALL_OPERATORS:
            raise invalid_grammar(
                f"its expressions have more than {MAX_OPERATORS} operators, or more than {_MAX_ALL_OPERATORS} in all"
            )
        return Part(slashed(text), size=max(1, size))

    def reference(self, part: Part) -> str:
        """Returns how a rule refers to `part`."""
        return self.terminal(part.body) if part.is_expression else part.body

    def sequence(self, parts: Sequence[Part]) -> Part:
        """Returns `parts` one after another. Adjacent expressions become one, unless it would be too large."""
        runs: list[Part] = []
        for is_expression, each in groupby(parts, key=lambda part: part.is_expression):
            run = list(each)
            joined = Part(" ".join(part.body for part in run), is_expression, sum(part.size for part in run))
            runs += [joined] if joined.size <= MAX_OPERATORS else [Part(self.reference(part), False) for part in run]
        if len(runs) <= 1:
            return runs[0] if runs else Part('""')
        return Part(" ".join(map(self.reference, runs)), is_expression=False)

    def alternatives(self, options: Sequence[Part]) -> Part:
        """Returns the part that is one of `options`."""
        size = sum(option.size for option in options)
        if all(option.is_expression for option in options) and size <= MAX_OPERATORS:
            return Part(f"({one_of(option.body for option in options)})", size=size)
        return Part(f"({one_of(map(self.reference, options))})", is_expression=False)

    def text(self, start: Part) -> str:
        """Returns the grammar whose texts are those of `start`."""
        line = f"start: {self.reference(start)}"
        terminals = (f"{name}: {expression}" for expression, name in self._terminals.items())
        return "\n".join([line, *self._lines, *terminals])


def repeated(part: Part, times: str) -> Part:
    """Returns `part` as often as `times` allows, such as "*" or "{2,5}"."""
    return replace(part, body=f"({part.body}){times}", size=part.size + 1)


def invalid_grammar(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"the grammar cannot be used: {reason}")


def num_operators(expression: str) -> int:
    """Returns the number of characters that make a regular expression slow to compile."""
    return len(re.findall(r"[?*+{.\[(]", re.sub(r"\\.", "", expression, flags=re.DOTALL)))


def one_of(options: Iterable[str]) -> str:
    return " | ".join(dict.fromkeys(options))


def literal(text: str) -> str:
    """Returns the text itself as part of a rule."""
    return re.sub(
        r"[\x00-\x1f\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", json.dumps(text, ensure_ascii=False)
    )


def slashed(expression: str) -> str:
    """Returns a regular expression as a part of a terminal."""

    def escape(found: re.Match[str]) -> str:
        return {"/": "\\/", "\n": "\\n"}.get(found[0][-1], found[0])

    return "/" + re.sub(r"\\.|[/\n]", escape, expression, flags=re.DOTALL) + "/"


def without_anchors(expression: str) -> str:
    """Returns `expression`, which has to match the whole text, without the anchors at its ends."""
    start = expression.removeprefix("^")
    return start[:-1] if re.search(r"(?<!\\)(\\\\)*\$$", start) else start
