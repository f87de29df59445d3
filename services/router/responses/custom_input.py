"""Reads the text of a custom tool's call from the arguments of its function: {"input": "..."}."""

from __future__ import annotations

import json
import re

from services.router.http.json_values import parse_json
from services.router.output.tools import INPUT_PARAMETER

_BEGIN = re.compile(rf'\s*\{{\s*"{INPUT_PARAMETER}"\s*:\s*"')
_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
# Complete characters of a JSON string.
_COMPLETE = re.compile(
    r'(?:[^"\\]+'
    r'|\\["\\/bfnrt]'
    rf"|{_HIGH}{_LOW}"
    rf"|(?!{_HIGH})\\u[0-9a-fA-F]{{4}}"
    rf"|{_HIGH}(?=[^\\]|\\[^u]|\\u[0-9a-fA-F]{{4}}))*"  # the other half of the surrogate pair is missing
)
_SURROGATES = re.compile("[\ud800-\udfff]")


class CustomInput:
    """Decodes the text of one call while its arguments arrive.

    Arguments in another form are returned unchanged as the text.
    """

    def __init__(self) -> None:
        self._unread = ""
        self._has_begun = False
        self._has_ended = False

    def push(self, arguments: str) -> str:
        """Returns the text that `arguments`, the next piece, adds."""
        if self._has_ended:
            return ""
        self._unread += arguments
        if not self._has_begun:
            begin = _BEGIN.match(self._unread)
            if begin is None:
                return ""
            self._has_begun = True
            self._unread = self._unread[begin.end() :]
        complete = _COMPLETE.match(self._unread)
        assert complete is not None  # it may be empty
        self._unread = self._unread[complete.end() :]
        self._has_ended = self._unread.startswith('"')
        return _decoded(complete[0])

    def end(self) -> str:
        """Returns the remaining text. Must be called after all arguments have arrived."""
        if self._has_begun:
            return ""
        try:
            arguments = parse_json(self._unread.encode())
        except ValueError:
            return self._unread
        text = arguments.get(INPUT_PARAMETER) if isinstance(arguments, dict) else None
        return text if isinstance(text, str) else self._unread


def _decoded(characters: str) -> str:
    text: str = json.loads(f'"{characters}"', strict=False)
    return _SURROGATES.sub("\ufffd", text)  # lone surrogates, which UTF-8 cannot encode
