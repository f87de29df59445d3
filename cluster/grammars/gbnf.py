"""Writes the rules of a grammar in GBNF, the form of llama.cpp and xgrammar, whose start is `root`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from cluster.errors import InvalidRequestError
from cluster.grammars.rules import Rules, literal, one_of, slashed

_MAX_DEPTH = 64
_MAX_SIZE = 4096  # of an expression; larger ones are parsed

_TOKEN = re.compile(
    r"""\s+ | \#[^\n]*
    | (?P<name>[A-Za-z_][\w.-]*) (?P<defines>\s*::=)?
    | (?P<text>"(?:\\.|[^"\\\n])*")
    | (?P<characters>\[\^?(?:\\.|[^\]\\\n])*\])
    | (?P<times>\{\s*\d+\s*(?:,\s*\d*\s*)?\})
    | (?P<sign>[()|*+?.])""",
    re.VERBOSE | re.ASCII,
)
_NONE = re.compile(r"\{\s*(?:0+\s*,\s*)?0+\s*\}")
_CHARACTER = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL)
_SHORT = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "b": "\b", "v": "\v", "0": "\0"}


def gbnf_rules(rules: Rules, text: str) -> str:
    """Adds the rules of `text` to `rules`. Returns the name of the start.

    Parts that do not lead to recursion are expressions. Before a part that does, they take the longest text that they
    match. Raises InvalidRequestError.
    """
    return _Grammar(rules, text).write()


@dataclass(frozen=True, slots=True)
class _Part:
    body: str
    is_expression: bool = True
    size: int = 1  # parts of an expression after all references are replaced


class _Grammar:
    def __init__(self, rules: Rules, text: str) -> None:
        self._rules = rules
        self._bodies: dict[str, list[re.Match[str]]] = {}
        body: list[re.Match[str]] | None = None
        for found in _tokens(text):
            if found["defines"]:
                if found["name"] in self._bodies:
                    raise _refusal(f"it defines the rule {found['name'][:64]} twice")
                body = self._bodies[found["name"]] = []
            elif body is None:
                raise _refusal("it should begin with a rule, such as root ::= ...")
            else:
                body.append(found)
        self._parts: dict[str, _Part] = {}  # by the names of rules

    def write(self) -> str:
        references = {name: {found["name"] for found in body if found["name"]} for name, body in self._bodies.items()}
        for name in {"root"}.union(*references.values()) - references.keys():
            raise _refusal(f"it has no rule {name[:64]}")
        users: dict[str, list[str]] = {name: [] for name in references}
        for name, used in references.items():
            for each in used:
                users[each].append(name)
        # Rules without references first, then those that refer to these only, and so on. The rest leads to recursion.
        ready = [name for name, used in references.items() if not used]
        while ready:
            name = ready.pop()
            part = self._read(name)
            if part.is_expression and part.size <= _MAX_SIZE:
                self._parts[name] = replace(part, body=self._rules.terminal(part.body))
            else:
                self._parts[name] = _Part(self._rules.add(self._in_rule(part)), is_expression=False)
            for user in users[name]:
                references[user].remove(name)
                if not references[user]:
                    ready.append(user)
        recursive = [name for name in self._bodies if name not in self._parts]
        self._parts |= {name: _Part(self._rules.new_name(), is_expression=False) for name in recursive}
        self._rules.may_be_ambiguous |= bool(recursive)
        for name in recursive:
            self._rules.add(self._read(name).body, self._parts[name].body)
        return self._parts["root"].body

    def _read(self, name: str) -> _Part:
        tokens = [*self._bodies[name]]
        tokens.reverse()
        part = self._alternatives(tokens, 0)
        if tokens:
            raise _refusal(f"the rule {name[:64]} has {tokens[-1][0]} at the wrong place")
        return part

    def _alternatives(self, tokens: list[re.Match[str]], depth: int) -> _Part:
        """Reads the alternatives at the end of `tokens`, which come in reverse order."""
        if depth > _MAX_DEPTH:
            raise _refusal(f"it has more than {_MAX_DEPTH} parentheses within each other")
        options = [self._sequence(tokens, depth)]
        while tokens and tokens[-1]["sign"] == "|":
            tokens.pop()
            options.append(self._sequence(tokens, depth))
        if all(option.is_expression for option in options):
            return _Part(one_of(option.body for option in options), size=sum(option.size for option in options))
        return _Part(one_of(map(self._in_rule, options)), is_expression=False)

    def _sequence(self, tokens: list[re.Match[str]], depth: int) -> _Part:
        parts: list[_Part] = []
        while tokens and tokens[-1]["sign"] not in ("|", ")"):
            found = tokens.pop()
            if found["sign"] == "(":
                inner = self._alternatives(tokens, depth + 1)
                if not tokens or tokens.pop()["sign"] != ")":
                    raise _refusal("a parenthesis is not closed")
                parts.append(replace(inner, body=f"({inner.body})"))
            elif found["times"] and _NONE.fullmatch(found["times"]):
                parts[-1:] = []
            elif found["times"] or found["sign"] in ("*", "+", "?"):
                if not parts:
                    raise _refusal(f"{found[0]} has nothing before it to repeat")
                repeated = parts.pop()
                parts.append(replace(repeated, body=f"({repeated.body}){found[0]}"))
            else:
                parts.append(self._parts[found["name"]] if found["name"] else _Part(_text(found), size=len(found[0])))
        runs = [
            _Part(" ".join(part.body for part in run), is_expression, sum(part.size for part in run))
            for is_expression, each in groupby(parts, key=lambda part: part.is_expression)
            if (run := list(each))
        ]
        if len(runs) <= 1:
            return runs[0] if runs else _Part('""')
        return _Part(" ".join(map(self._in_rule, runs)), is_expression=False)

    def _in_rule(self, part: _Part) -> str:
        return self._rules.terminal(part.body) if part.is_expression else part.body


def _refusal(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"the grammar cannot be used: {reason}")


def _tokens(text: str) -> Iterator[re.Match[str]]:
    position = 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            line = text.count("\n", 0, position) + 1
            raise _refusal(f"line {line} has {text[position : position + 20]!r}, which is not GBNF")
        position = found.end()
        if found.lastgroup is not None:
            yield found


def _text(found: re.Match[str]) -> str:
    if found["text"]:
        return literal("".join(character for character, _ in _characters(found["text"][1:-1])))
    return slashed(_class(found["characters"][1:-1]) if found["characters"] else "(?s:.)")


def _characters(text: str) -> Iterator[tuple[str, bool]]:
    """Returns the characters that `text` spells, and whether each is written without an escape."""
    for found in _CHARACTER.finditer(text):
        *codes, short, plain = found.groups()
        code = next((chr(int(code, 16)) for code in codes if code and int(code, 16) < sys.maxunicode + 1), "")
        character = plain or code or (_SHORT.get(short, "" if short.isalnum() else short) if short else "")
        if not character or "\ud800" <= character <= "\udfff":
            raise _refusal(f"it has the unknown escape {found[0]}")
        yield character, bool(plain)


def _class(text: str) -> str:
    """Returns the regular expression of the class of characters `text`."""
    negation, rest = ("^", text[1:]) if text.startswith("^") else ("", text)
    each = list(_characters(rest))
    written = "".join(
        "-" if plain and character == "-" and 0 < index < len(each) - 1 else f"\\u{{{ord(character):x}}}"
        for index, (character, plain) in enumerate(each)
    )
    return f"[{negation}{written}]"
