"""Rewritten expressions match what JSON Schema's do: anywhere in a string, unless anchors bind them."""

from __future__ import annotations

import re

import pytest

from services.router.structured.patterns import rewrite

TEXTS = ["", "a", "ab", "ba", "bab", "https://a.example", "see https://a", "x.md", "x.mdx", " ", "7", "a7", "7a"]
PATTERNS = [
    "",
    "^",
    "$",
    "a",
    "^a",
    "a$",
    "^a$",
    "^https?://",
    r"\.md$",
    r"\S",
    "^a|7$",
    "(^a|b)7?",
    "(a|b$)",
    "^(a|7)$",
    "a.*b",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_is_searched_for(pattern: str) -> None:
    rewritten = re.compile(rewrite(pattern).text)
    assert {text for text in TEXTS if rewritten.fullmatch(text)} == {text for text in TEXTS if re.search(pattern, text)}


def test_formats_hold_for_the_whole_string() -> None:
    assert rewrite("a", is_search=False).texts() == ("a",)
