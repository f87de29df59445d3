"""Types of the arguments of commands: parsers for argparse, which raise argparse.ArgumentTypeError."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable

MAX_STREAMS = 256
_MAX_QUOTED = 40  # characters that a message quotes


def above_zero(kind: type[int] | type[float], at_most: float = math.inf) -> Callable[[str], float]:
    """Returns a parser of numbers above 0."""

    def parse(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            number = 0
        if not (0 < number <= at_most and number < math.inf):
            most = "" if at_most == math.inf else f", {at_most:,} at most"
            raise argparse.ArgumentTypeError(f"{quoted(text)} is not a number above 0{most}")
        return number

    return parse


def share(text: str) -> float:
    """Parses a number from 0 to 1."""
    return _from_zero(text, 1.0, "to 1")


def not_below_zero(text: str) -> float:
    """Parses a number from 0 up."""
    return _from_zero(text, sys.float_info.max, "up")


def _from_zero(text: str, most: float, bound: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= most:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not a number from 0 {bound}")
    return number


def seed(text: str) -> int:
    """Parses a whole number of 63 bits, which every library takes."""
    number = _whole_number(text)
    if not 0 <= number < 2**63:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not a whole number from 0 to 2**63 - 1")
    return number


def _whole_number(text: str) -> int:
    """Returns -1 if `text` is not a whole number."""
    try:
        return int(text)
    except ValueError:
        return -1


def quoted(text: str) -> str:
    """Returns the beginning of `text` in quotes, for an error message."""
    return repr(text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}...")


def temperature_list(text: str) -> tuple[float, ...]:
    """Parses temperatures that are separated by commas."""
    try:
        found = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        found = (-1.0,)
    if not all(0 <= temperature <= 2 for temperature in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not temperatures from 0 to 2, such as 0,0.7,1")
    return found


def stream_counts(text: str) -> tuple[int, ...]:
    """Parses numbers of streams that are separated by commas."""
    try:
        found = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        found = (0,)
    if not all(0 < number <= MAX_STREAMS for number in found):
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not numbers from 1 to {MAX_STREAMS}, such as 1,4,16")
    return found


def depth_or_auto(text: str) -> int | str:
    """Parses a number of draft tokens, or "auto"."""
    if text == "auto":
        return text
    number = _whole_number(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is neither auto nor a whole number from 0 up")
    return number


def name_and_value(text: str) -> tuple[str, str]:
    """Parses NAME=VALUE."""
    name, separator, value = text.partition("=")
    if not (separator and name and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value
