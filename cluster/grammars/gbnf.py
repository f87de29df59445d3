"""Translates GBNF, the grammar format of llama.cpp and xgrammar, into rules. The start is `root`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace

from cluster.grammars.rules import Part, Rules, invalid_grammar, literal, repeated, slashed

_MAX_DEPTH = 64
_MAX_SIGNS = 4000  # llguidance takes up to a second for them

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


def gbnf_part(rules: Rules, text: str) -> Part:
    """Adds the rules of `text` to `rules`. Returns the start.

    Rules without recursion become expressions. Directly before a recursive rule, such an expression takes the longest
    text that it matches. Raises InvalidRequestError.
    """
    return _Grammar(rules, text).write()


class _Grammar:
    def __init__(self, rules: Rules, text: str) -> None:
        self._rules = rules
        self._bodies: dict[str, list[re.Match[str]]] = {}
        body: list[re.Match[str]] | None = None
        for found in _tokens(text):
            if found["defines"]:
                if found["name"] in self._bodies:
                    raise invalid_grammar(f"it defines the rule {found['name'][:64]} twice")
                body = self._bodies[found["name"]] = []
            elif body is None:
                raise invalid_grammar("it should begin with a rule, such as root ::= ...")
            else:
                body.append(found)
        if sum(not (found["name"] or found["text"]) for body in self._bodies.values() for found in body) > _MAX_SIGNS:
            raise invalid_grammar(f"it has more than {_MAX_SIGNS} classes, repetitions, parentheses and alternatives")
        self._parts: dict[str, Part] = {}  # by the names of rules

    def write(self) -> Part:
        references = {name: {found["name"] for found in body if found["name"]} for name, body in self._bodies.items()}
        for name in {"root"}.union(*references.values()) - references.keys():
            raise invalid_grammar(f"it has no rule {name[:64]}")
        users: dict[str, list[str]] = {name: [] for name in references}
        for name, used in references.items():
            for each in used:
                users[each].append(name)
        # Rules without references first, then those that refer to these only, and so on. The rest leads to recursion.
        ready = [name for name, used in references.items() if not used]
        while ready:
            name = ready.pop()
            part = self._read(name)
            body = self._rules.terminal(part.body) if part.is_expression else self._rules.add(part.body)
            self._parts[name] = replace(part, body=body)
            for user in users[name]:
                references[user].remove(name)
                if not references[user]:
                    ready.append(user)
        recursive = [name for name in self._bodies if name not in self._parts]
        self._parts |= {name: Part(self._rules.new_name(), is_expression=False) for name in recursive}
        for name in recursive:
            self._rules.add(self._rules.reference(self._read(name)), self._parts[name].body)
        return self._parts["root"]

    def _read(self, name: str) -> Part:
        tokens = [*self._bodies[name]]
        tokens.reverse()
        part = self._alternatives(tokens, 0)
        if tokens:
            raise invalid_grammar(f"the rule {name[:64]} has {tokens[-1][0]} at the wrong place")
        return part

    def _alternatives(self, tokens: list[re.Match[str]], depth: int) -> Part:
        """Reads the alternatives at the end of `tokens`, which come in reverse order."""
        if depth > _MAX_DEPTH:
            raise invalid_grammar(f"it has more than {_MAX_DEPTH} parentheses within each other")
        options = [self._sequence(tokens, depth)]
        while tokens and tokens[-1]["sign"] == "|":
            tokens.pop()
            options.append(self._sequence(tokens, depth))
        return self._rules.alternatives(options) if len(options) > 1 else options[0]

    def _sequence(self, tokens: list[re.Match[str]], depth: int) -> Part:
        parts: list[Part] = []
        while tokens and tokens[-1]["sign"] not in ("|", ")"):
            found = tokens.pop()
            if found["sign"] == "(":
                parts.append(self._alternatives(tokens, depth + 1))
                if not tokens or tokens.pop()["sign"] != ")":
                    raise invalid_grammar("a parenthesis is not closed")
            elif found["times"] or found["sign"] in ("*", "+", "?"):
                if not parts:
                    raise invalid_grammar(f"{found[0]} has nothing before it to repeat")
                part = parts.pop()
                if not (found["times"] and _NONE.fullmatch(found["times"])):
                    parts.append(repeated(part, found[0]))
            else:
                parts.append(self._parts[found["name"]] if found["name"] else Part(_text(found)))
        return self._rules.sequence(parts)


def _tokens(text: str) -> Iterator[re.Match[str]]:
    position = 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            line = text.count("\n", 0, position) + 1
            raise invalid_grammar(f"line {line} has {text[position : position + 20]!r}, which is not GBNF")
        position = found.end()
        if found.lastgroup is not None:
            yield found


def _text(found: re.Match[str]) -> str:
    if found["text"]:
        return literal("".join(character for character, _ in _characters(found["text"][1:-1])))
    return slashed(_character_class(found["characters"][1:-1]) if found["characters"] else "(?s:.)")


def _characters(text: str) -> Iterator[tuple[str, bool]]:
    """Returns the characters that `text` spells, and whether each is written without an escape."""
    for found in _CHARACTER.finditer(text):
        *codes, short, plain = found.groups()
        code = next((chr(int(code, 16)) for code in codes if code and int(code, 16) < sys.maxunicode + 1), "")
        character = plain or code or (_SHORT.get(short, "" if short.isalnum() else short) if short else "")
        if not character or "\ud800" <= character <= "\udfff":
            raise invalid_grammar(f"it has the unknown escape {found[0]}")
        yield character, bool(plain)


def _character_class(text: str) -> str:
    """Returns the regular expression of the class of characters `text`."""
    negation, rest = ("^", text[1:]) if text.startswith("^") else ("", text)
    each = list(_characters(rest))
    written = "".join(
        "-" if plain and character == "-" and 0 < index < len(each) - 1 else f"\\u{{{ord(character):x}}}"
        for index, (character, plain) in enumerate(each)
    )
    return f"[{negation}{written}]"
