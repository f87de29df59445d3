"""Scans JSON that arrives character by character."""

from __future__ import annotations

import enum
import re

MAX_DEPTH = 128

_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_HEXADECIMAL = frozenset("0123456789abcdefABCDEF")
_OF_NUMBERS = frozenset("0123456789+-.eE")
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}


class ValuePosition(enum.Enum):
    INSIDE = enum.auto()
    LAST = enum.auto()  # the character ends the value
    PAST = enum.auto()  # the value ended before the character: a number has no last character of its own
    BAD = enum.auto()


class _Expects(enum.Enum):
    VALUE = enum.auto()
    VALUE_OR_END = enum.auto()
    KEY = enum.auto()
    KEY_OR_END = enum.auto()
    COLON = enum.auto()
    COMMA_OR_END = enum.auto()
    STRING = enum.auto()
    ESCAPE = enum.auto()
    HEX = enum.auto()
    NUMBER = enum.auto()
    LITERAL = enum.auto()


class JsonScanner:
    """Tracks the position within one JSON value."""

    def __init__(self) -> None:
        self._expects = _Expects.VALUE
        self._open: list[str] = []  # stack of the open brackets
        self._is_key = False
        self._rest = ""  # rest of a literal
        self._num_hex = 0
        self._number = ""

    @property
    def is_in_string(self) -> bool:
        """True if only quotes, backslashes and control characters change the state."""
        return self._expects is _Expects.STRING

    def repaired(self, character: str) -> str:
        """Returns the next `character` as valid JSON: models forget to escape newlines in strings."""
        if self._expects is _Expects.STRING and character < " ":
            return _ESCAPES.get(character, f"\\u{ord(character):04x}")
        return character

    def step(self, character: str) -> ValuePosition:
        match self._expects:
            case _Expects.STRING:
                return self._in_string(character)
            case _Expects.ESCAPE:
                self._expects = _Expects.STRING
                if character == "u":
                    self._expects, self._num_hex = _Expects.HEX, 0
                    return ValuePosition.INSIDE
                return ValuePosition.INSIDE if character in '"\\/bfnrt' else ValuePosition.BAD
            case _Expects.HEX:
                self._num_hex += 1
                if self._num_hex == 4:
                    self._expects = _Expects.STRING
                return ValuePosition.INSIDE if character in _HEXADECIMAL else ValuePosition.BAD
            case _Expects.LITERAL:
                if character != self._rest[0]:
                    return ValuePosition.BAD
                self._rest = self._rest[1:]
                return ValuePosition.INSIDE if self._rest else self._ended()
            case _Expects.NUMBER:
                return self._in_number(character)
        return ValuePosition.INSIDE if character in " \t\r\n" else self._between(character)

    def _in_string(self, character: str) -> ValuePosition:
        if character == "\\":
            self._expects = _Expects.ESCAPE
        elif character == '"':
            if not self._is_key:
                return self._ended()
            self._expects, self._is_key = _Expects.COLON, False
        return ValuePosition.INSIDE

    def _in_number(self, character: str) -> ValuePosition:
        if character in _OF_NUMBERS:
            self._number += character
            return ValuePosition.INSIDE if len(self._number) <= 400 else ValuePosition.BAD
        if not _NUMBER.fullmatch(self._number):
            return ValuePosition.BAD
        if self._ended() is ValuePosition.LAST:
            return ValuePosition.PAST
        return self.step(character)

    def _between(self, character: str) -> ValuePosition:
        expects = self._expects
        if character in "}]" and expects in (_Expects.COMMA_OR_END, _Expects.KEY_OR_END, _Expects.VALUE_OR_END):
            if self._open.pop() != {"}": "{", "]": "["}[character]:
                return ValuePosition.BAD
            return self._ended()
        if expects is _Expects.COMMA_OR_END and character == ",":
            self._expects = _Expects.KEY if self._open[-1] == "{" else _Expects.VALUE
        elif expects is _Expects.COLON and character == ":":
            self._expects = _Expects.VALUE
        elif expects in (_Expects.KEY, _Expects.KEY_OR_END) and character == '"':
            self._expects, self._is_key = _Expects.STRING, True
        elif expects in (_Expects.VALUE, _Expects.VALUE_OR_END):
            return self._begun(character)
        else:
            return ValuePosition.BAD
        return ValuePosition.INSIDE

    def _begun(self, character: str) -> ValuePosition:
        if character in "{[":
            if len(self._open) == MAX_DEPTH:
                return ValuePosition.BAD
            self._open.append(character)
            self._expects = _Expects.KEY_OR_END if character == "{" else _Expects.VALUE_OR_END
        elif character == '"':
            self._expects = _Expects.STRING
        elif character in "-0123456789":
            self._expects, self._number = _Expects.NUMBER, character
        elif character in _LITERALS:
            self._expects, self._rest = _Expects.LITERAL, _LITERALS[character][1:]
        else:
            return ValuePosition.BAD
        return ValuePosition.INSIDE

    def _ended(self) -> ValuePosition:
        """Returns the position after a value: LAST, or INSIDE an enclosing value."""
        self._expects = _Expects.COMMA_OR_END
        return ValuePosition.INSIDE if self._open else ValuePosition.LAST
