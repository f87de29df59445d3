"""Reads calls that models write as JSON: {"name": ..., "arguments": {...}}."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection

from pydantic_core import from_json

from services.router.output.json_text import JsonScanner, ValuePosition
from services.router.output.source import WHITE_SPACE, Reading, Source, Writer

_IN_STRINGS = re.compile(r'[^"\\\x00-\x1f]*')
NAME_KEYS = frozenset({"name", "function"})
ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
MAX_NAME_CHARACTERS = 256


class _MalformedError(Exception):
    """The next character cannot continue a call; it is left unread."""


def read_call(source: Source, writer: Writer, names: Collection[str] | None = None) -> Reading[bool]:
    """Reads a call after its `{`. Returns False without output if it is none.

    With `names` the call must name one of them and have arguments; otherwise any JSON object with a name would count as
    a call. A call that breaks off within its arguments counts, with the arguments so far.
    """
    call = _Call(source, writer, names)
    try:
        yield from call.read()
    except _MalformedError:
        return call.has_begun
    return True


def read_arguments(source: Source, writer: Writer) -> Reading[bool]:
    """Reads the arguments of a call after their `{`. Returns False if they break off.

    The call must have been written with `begin_call`.
    """
    writer.arguments("{")
    try:
        yield from _value(source, "{", writer.arguments)
    except _MalformedError:
        return False
    return True


def read_calls(source: Source, writer: Writer) -> Reading[bool]:
    """Reads a list of calls after its `[`. Returns False if the first is none."""
    is_first = True
    while (yield from source.skip()) == "{":
        if not (yield from read_call(source, writer)):
            return not is_first
        is_first = False
        if (character := (yield from source.skip())) != ",":
            if character != "]":
                source.unread(character)
            return True
    return not is_first


class _Call:
    def __init__(self, source: Source, writer: Writer, names: Collection[str] | None) -> None:
        self.has_begun = False
        self._source = source
        self._writer = writer
        self._names = names
        self._name: str | None = None
        self._arguments: str | None = None  # arguments that came before the name

    def read(self) -> Reading[None]:
        source = self._source
        is_first = True
        while True:
            character = yield from source.skip()
            if character == "}" and is_first:
                break
            if character != '"':
                self._fail(character)
            key = json.loads((yield from _collected(source, '"')), strict=False)
            if is_first and key not in ARGUMENT_KEYS | NAME_KEYS | {"type", "id"}:
                raise _MalformedError  # as early as possible: an answer that is other JSON should stream
            is_first = False
            if (character := (yield from source.skip())) != ":":
                self._fail(character)
            yield from self._member(key, (yield from source.skip()))
            character = yield from source.skip()
            if character == "}":
                break
            if character != ",":
                self._fail(character)
        self._finish()

    def _member(self, key: str, first: str) -> Reading[None]:
        """Reads the value of `key`, which begins with `first`."""
        source = self._source
        if not first:
            raise _MalformedError
        if key in ARGUMENT_KEYS and first == "{" and self._name is not None and not self.has_begun:
            self._begin()
            if not (yield from read_arguments(source, self._writer)):
                raise _MalformedError
            return
        text = yield from _collected(source, first)
        value = json.loads(text, strict=False)
        if key in NAME_KEYS and isinstance(value, str):
            self._name = value
            if not is_name(value) or (self._names is not None and value not in self._names):
                raise _MalformedError
        elif key in ARGUMENT_KEYS and not self.has_begun:
            if isinstance(value, str):  # some models write the object as a JSON string, as the API does
                text, value = _loaded(value.strip() or "{}")
            if value is None:
                text, value = "{}", {}
            if not isinstance(value, dict):
                raise _MalformedError
            self._arguments = text

    def _begin(self) -> None:
        assert self._name is not None
        self.has_begun = True
        self._writer.begin_call(self._name)

    def _finish(self) -> None:
        if self.has_begun:
            return
        if self._name is None or (self._arguments is None and self._names is not None):
            raise _MalformedError
        self._begin()
        self._writer.arguments(self._arguments or "{}")

    def _fail(self, character: str) -> None:
        self._source.unread(character)
        raise _MalformedError


def is_name(text: str) -> bool:
    """Returns whether a function may have the name `text`.

    It must be printable. This excludes lone surrogates, which JSON can spell.
    """
    return 0 < len(text) <= MAX_NAME_CHARACTERS and text.isprintable()


def _loaded(text: str) -> tuple[str, object]:
    """Returns `text` and its JSON value. Raises _MalformedError if it is not JSON."""
    try:
        value = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise _MalformedError from error
    return text, value


def _collected(source: Source, first: str) -> Reading[str]:
    characters = [first]
    yield from _value(source, first, characters.append)
    return "".join(characters)


def _value(source: Source, first: str, take: Callable[[str], None]) -> Reading[None]:
    """Passes the JSON value that begins with `first` to `take`, without `first`.

    Raises _MalformedError if it is invalid or breaks off.
    """
    scanner = JsonScanner()
    step = scanner.step(first)
    if first in WHITE_SPACE or step is ValuePosition.BAD:
        source.unread(first)
        raise _MalformedError
    while step is ValuePosition.INSIDE:
        if scanner.is_in_string and (text := source.run(_IN_STRINGS)):
            take(text)
        character = yield from source.read()
        if not character:
            raise _MalformedError
        repaired = scanner.repaired(character)
        step = scanner.step(character)
        if step in (ValuePosition.PAST, ValuePosition.BAD):
            source.unread(character)
            if step is ValuePosition.BAD:
                raise _MalformedError
        else:
            take(repaired)
