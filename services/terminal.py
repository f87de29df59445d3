"""Makes text from other programs safe to print on a terminal: names of workers and models, errors, answers.

Escape sequences can move a terminal's cursor, set its title or fill its clipboard. So everything that a command prints
passes through here, and a control character is shown as a program would write it (`\\x1b`).
"""

from __future__ import annotations

import re

# Control characters; those that end a line or change the direction of text; lone surrogates, which cannot
# be encoded.
_NO_TEXT = r"\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_IN_LINES = re.compile(f"[{_NO_TEXT}]")
_IN_TEXTS = re.compile(f"(?![\n\t])[{_NO_TEXT}]")


def as_line(text: str) -> str:
    """Returns `text` in one line: a name with a line break cannot look like a line of the command's own."""
    return _IN_LINES.sub(_written, text)


def as_lines(lines: list[str]) -> str:
    """Returns each of `lines` in one line."""
    return "\n".join(map(as_line, lines))


def as_text(text: str) -> str:
    """Returns `text` with its line breaks and tabs."""
    return _IN_TEXTS.sub(_written, text)


def _written(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
