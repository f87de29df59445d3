"""The string formats of schemas: those enforced, with their expressions, and those ignored."""

from __future__ import annotations

from services.router.structured.patterns import Pattern, rewrite

_YEAR = r"(?:000[1-9]|00[1-9]\d|0[1-9]\d{2}|[1-9]\d{3})"
_LEAP_YEAR = r"(?:\d{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1\d|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
    rf"|{_LEAP_YEAR}-02-29)"
)
_OFFSET = r"(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_TIME = rf"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{{1,9}})?{_OFFSET}"
_NUMBER = r"\d{1,5}"
_DURATION_TIME = rf"T(?:{_NUMBER}H(?:{_NUMBER}M(?:{_NUMBER}S)?)?|{_NUMBER}M(?:{_NUMBER}S)?|{_NUMBER}S)"
_DURATION_DATE = rf"(?:{_NUMBER}Y(?:{_NUMBER}M(?:{_NUMBER}D)?)?|{_NUMBER}M(?:{_NUMBER}D)?|{_NUMBER}D)"
_LABEL = r"[a-z0-9]{1,20}(?:-[a-z0-9]{1,20}){0,2}"  # two hyphens in a row would encode another alphabet
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL}){{0,5}}"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d{2}|[1-9]?\d)"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_GROUP = r"[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(
    [
        rf"(?:{_GROUP}:){{7}}{_GROUP}",
        rf"(?:{_GROUP}:){{1,7}}:",
        *(rf"(?:{_GROUP}:){{1,{7 - after}}}(?::{_GROUP}){{{after}}}" for after in range(1, 7)),
        rf":(?::{_GROUP}){{1,7}}",
        "::",
    ]
)
_URI_CHARACTER = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})"
_AUTHORITY = rf"//{_HOSTNAME}(?::(?:[1-5]\d{{4}}|[1-9]\d{{0,3}}))?"
_SCHEME = r"[a-zA-Z][a-zA-Z0-9+.-]{0,15}:"
_FRAGMENT = rf"(?:#{_URI_CHARACTER}*)?"
_HEX = "[0-9a-fA-F]"


def _uuid(version: str) -> str:
    variant = _HEX if version == _HEX else "[89abAB]"
    return f"{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-{variant}{_HEX}{{3}}-{_HEX}{{12}}"


_EXPRESSIONS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME}|{_NUMBER}W)",
    "email": rf"[a-zA-Z0-9_+-]{{1,30}}(?:\.[a-zA-Z0-9_+-]{{1,30}})?@{_HOSTNAME}",
    "hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": rf"{_SCHEME}{_AUTHORITY}(?:/{_URI_CHARACTER}*)?{_FRAGMENT}|(?:mailto|urn|tel|data):{_URI_CHARACTER}+",
    "uri-reference": rf"(?:{_SCHEME})?{_AUTHORITY}(?:/{_URI_CHARACTER}*)?{_FRAGMENT}"
    rf"|/?[A-Za-z0-9._~-]+(?:/[A-Za-z0-9._~-]+)*/?{_FRAGMENT}",
    "json-pointer": r"(?:/(?:[^/~]|~[01])*)*",
    "uuid": _uuid(_HEX),
    **{f"uuid{version}": _uuid(str(version)) for version in range(1, 9)},
}

PATTERNS: dict[str, Pattern] = {name: rewrite(expression, is_search=False) for name, expression in _EXPRESSIONS.items()}
"""The expressions of the formats that are enforced."""

UNCHECKED = frozenset(
    {
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float", "double", "decimal"),
        *("password", "binary", "path", "file-path", "directory-path", "json-string"),
    }
)
"""Formats of OpenAPI and pydantic that no validator checks: every value has them."""
