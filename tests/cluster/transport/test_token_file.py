"""Token files, usable and unusable ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.errors import ConfigurationError
from cluster.transport.token_file import TokenFile

SETTING = "target.metrics_token_file"
FIRST, SECOND = "first-0123456789", "second-0123456789"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read"),
        ("gültig-0123456789abc", "is not ASCII text"),
        ("# only a comment\n\n", "has no token"),
        ("first-012345678", "is not 16 or more printable characters"),
        ("first\a0123456789abc", "is not 16 or more printable characters"),
        (f"{FIRST} {SECOND}", "without spaces"),
    ],
)
def test_an_unusable_file_is_refused_without_quoting_a_token(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=message) as raised:
        TokenFile(str(file), SETTING)
    assert SETTING in str(raised.value)
    assert content is None or content.strip() not in str(raised.value)


def test_the_tokens_of_all_lines_are_accepted(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"# the new one\n{FIRST}\n\n  {SECOND}\n", encoding="ascii")
    tokens = TokenFile(str(file), SETTING)
    assert tokens.current() == FIRST
    assert [tokens.accepts(token.encode()) for token in (FIRST, SECOND, "third-0123456789")] == [True, True, False]
