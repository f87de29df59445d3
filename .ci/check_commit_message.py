"""Checks the form of a commit message: `pre-commit install --hook-type commit-msg`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

MOST_CHARACTERS = 72
_SUBJECT = re.compile(r"(?:[a-z0-9_.-]+(?:, )?)+: [a-z`'\"A-Z0-9].*[^.]")
_GENERATED = ("Merge ", "Revert ", "fixup! ", "squash! ")


def problems(message: str) -> list[str]:
    """Returns what is wrong with `message`; lines that begin with # are not part of it."""
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    subject = lines[0] if lines else ""
    if subject.startswith(_GENERATED):
        return []
    found = []
    if len(subject) > MOST_CHARACTERS:
        found.append(f"the subject has {len(subject)} characters; at most {MOST_CHARACTERS}")
    if not _SUBJECT.fullmatch(subject):
        found.append(f"the subject {subject!r} is not `area: imperative sentence` without a full stop")
    if len(lines) > 1 and lines[1].strip():
        found.append("the second line is not empty")
    if not any(line.strip() for line in lines[2:]):
        found.append("there is no body: say why, and what was measured")
    return found


def main() -> int:
    found = problems(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for problem in found:
        print(f"commit message: {problem}", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
