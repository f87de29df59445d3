"""Writes rules in llguidance's form of Lark: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from cluster.constraints import MAX_WHITESPACE

BLANKS = f"[ \\n\\r\\t]{{0,{MAX_WHITESPACE}}}"


class Rules:
    """The rules of one grammar. A rule is parsed; a terminal is an expression and takes the longest text it matches."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._terminals: dict[str, str] = {}  # names by expression
        self.may_be_ambiguous = False  # has rules of clients that lead to recursion

    def new_name(self) -> str:
        """Returns a name for `add`, so that a rule can refer to one that is not written yet."""
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

    def text(self, start: str) -> str:
        """Returns the grammar whose texts are those of the rule `start`."""
        terminals = (f"{name}: {expression}" for expression, name in self._terminals.items())
        return "\n".join([f"start: {start}", *self._lines, *terminals])


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
