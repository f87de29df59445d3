"""Parses untrusted JSON, and limits its number of values.

A parser blocks every stream of the router while it runs.
"""

from __future__ import annotations

import codecs
import re
from typing import Any

import pydantic_core

MAX_CONTAINERS = 65_536  # objects and lists
MAX_STRINGS = 131_072  # strings, including names of fields
MAX_ITEMS = 1_200_000  # items of all lists and objects together: a request may have a million tokens


# An escape in a string; its group is an escape of a surrogate without its other half.
_HALF = rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
_ESCAPE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(" + _HALF + rb")|\\.", re.DOTALL)


class TooManyValuesError(ValueError):
    """A JSON text exceeds the limits on the number of its values."""


def parse_json(text: bytes) -> Any:
    """Returns the value of a JSON text. Raises ValueError if it is invalid.

    NaN, Infinity, invalid UTF-8 and nesting that is too deep are invalid. Raises TooManyValuesError, a ValueError, if
    it has too many values. An escaped half of a character becomes U+FFFD: clients that cut texts by UTF-16 units write
    it.
    """
    text = text.removeprefix(codecs.BOM_UTF8)  # some clients on Windows write one
    _check_number(text)
    try:
        return pydantic_core.from_json(text, allow_inf_nan=False)
    except ValueError:
        if (mended := without_halves(text)) == text:
            raise
        return pydantic_core.from_json(mended, allow_inf_nan=False)


def without_halves(text: bytes) -> bytes:
    """Returns a JSON text with U+FFFD in place of escapes of lone surrogates."""
    if re.search(_HALF, text) is None:
        return text
    return _ESCAPE.sub(lambda found: rb"\ufffd" if found[1] else found[0], text)


def _check_number(text: bytes) -> None:
    if len(text) <= MAX_CONTAINERS:  # each needs at least one byte
        return
    structure = text.replace(rb"\\", b"").replace(rb"\"", b"")
    num_strings = structure.count(b'"') // 2
    if num_strings > MAX_STRINGS:
        raise TooManyValuesError(f"it has {num_strings} strings and names; the limit is {MAX_STRINGS}")
    structure = b"".join(structure.split(b'"')[::2])  # without the contents of strings
    num_containers = structure.count(b"[") + structure.count(b"{")
    if num_containers > MAX_CONTAINERS:
        raise TooManyValuesError(f"it has {num_containers} lists and objects; the limit is {MAX_CONTAINERS}")
    num_items = structure.count(b",")
    if num_items > MAX_ITEMS:
        raise TooManyValuesError(f"it has {num_items} items; the limit is {MAX_ITEMS}")
