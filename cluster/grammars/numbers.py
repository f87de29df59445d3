"""Regular expressions of the numbers within bounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from math import ceil, floor

MAX_DIGITS = 18  # before the point, and after it in numbers without bounds
_MAX_DECIMALS = 6  # of a number with bounds
_EXACT_DIGITS = 15  # significant digits that a double keeps
_BEYOND = 10**MAX_DIGITS - 1

INTEGER = f"-?(?:0|[1-9][0-9]{{0,{MAX_DIGITS - 1}}})"
NUMBER = rf"{INTEGER}(?:\.[0-9]{{1,{MAX_DIGITS}}})?(?:[eE][+-]?[0-9]{{1,3}})?"


def integers(low: int | None, high: int | None) -> str:
    """Returns the expression of the integers from `low` to `high`."""
    return _signed(-_BEYOND if low is None else low, _BEYOND if high is None else high, 0)


def numbers(bounds: Mapping[str, float]) -> str:
    """Returns a regular expression for JSON numbers within `bounds`, without exponents.

    `bounds`: limits by their keywords in JSON schemas, such as `minimum`.
    """
    exact = {keyword: Fraction(str(bound)) for keyword, bound in bounds.items()}  # as written, not as a float
    smallest = max(exact.get("minimum", -_BEYOND), exact.get("exclusiveMinimum", -_BEYOND))
    largest = min(exact.get("maximum", _BEYOND), exact.get("exclusiveMaximum", _BEYOND))
    options = []
    for decimals in range(max_decimals(bounds) + 1):
        scale = 10**decimals
        low, high = ceil(smallest * scale), floor(largest * scale)
        low += Fraction(low, scale) == exact.get("exclusiveMinimum")
        high -= Fraction(high, scale) == exact.get("exclusiveMaximum")
        if low <= high:
            options.append(_signed(low, high, decimals))
    return f"(?:{'|'.join(options)})"


def max_decimals(bounds: Mapping[str, float]) -> int:
    """Returns the most decimals with which numbers differ from `bounds` also when parsed as doubles."""
    num_digits = max((len(str(int(abs(bound)))) for bound in bounds.values()), default=0)
    return max(0, min(_MAX_DECIMALS, _EXACT_DIGITS - num_digits))


def _signed(low: int, high: int, decimals: int) -> str:
    """Returns the expression of low / 10^decimals to high / 10^decimals, with exactly `decimals` decimals."""
    options = []
    if low < 0:
        options.append(f"-(?:{'|'.join(_unsigned(max(-high, 0 if decimals else 1), -low, decimals))})")
    if high >= 0:
        options.extend(_unsigned(max(low, 0), high, decimals))
    return f"(?:{'|'.join(options)})"


def _unsigned(low: int, high: int, decimals: int) -> Iterator[str]:
    shortest, longest = (max(len(str(bound)), decimals + 1) for bound in (low, high))
    for length in range(shortest, longest + 1):
        first = low if length == shortest else 10 ** (length - 1)
        last = high if length == longest else 10**length - 1
        yield _same_length(f"{first:0{length}d}", f"{last:0{length}d}", decimals)


def _same_length(low: str, high: str, decimals: int) -> str:
    """Returns the expression of the digits from `low` to `high`, with a point before the last `decimals`."""
    length = len(low)
    if not length:
        return ""
    point = r"\." if 0 < decimals == length else ""
    if low == "0" * length and high == "9" * length:
        if point or not 0 < decimals < length:
            return f"{point}[0-9]{{{length}}}"
        return rf"[0-9]{{{length - decimals}}}\.[0-9]{{{decimals}}}"
    first, last, rest = int(low[0]), int(high[0]), length - 1
    if first == last:
        return f"{point}{first}{_same_length(low[1:], high[1:], decimals)}"
    options = []
    if low[1:] != "0" * rest:
        options.append(f"{first}{_same_length(low[1:], '9' * rest, decimals)}")
        first += 1
    if high[1:] != "9" * rest:
        last -= 1
    if first <= last:
        digit = str(first) if first == last else f"[{first}-{last}]"
        options.append(f"{digit}{_same_length('0' * rest, '9' * rest, decimals)}")
    if high[1:] != "9" * rest:
        options.append(f"{high[0]}{_same_length('0' * rest, high[1:], decimals)}")
    return f"{point}(?:{'|'.join(options)})" if len(options) > 1 else f"{point}{options[0]}"
