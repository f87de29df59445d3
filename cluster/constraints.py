"""Constraints of a request on its tokens, before an engine works with them. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MAX_WHITESPACE = 16  # characters between two parts of a JSON text

# Limits of a request, in the HTTP API and on the wire.
MAX_TOKEN_COUNT = 2**31 - 1  # any number of tokens
MAX_STOP_TOKENS = 256
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARACTERS = 256
MAX_ALLOWED_TOKENS = 1_000_000

GrammarForm = Literal["json_schema", "regex", "ebnf", "structural_tag"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """The grammar of an answer's text; the sequence ends where the grammar ends."""

    form: GrammarForm
    text: str  # the schema as JSON, the expression, the rules as GBNF writes them, or the tags as JSON


@dataclass(frozen=True, slots=True)
class Constraints:
    """Constraints that only the target applies: a draft that they forbid is removed before it is verified."""

    allowed_token_ids: tuple[int, ...] = ()  # (): any character
    bad_words: tuple[tuple[int, ...], ...] = ()  # token IDs; none of them may be completed
    min_tokens: int = 0  # the sequence cannot end before it has generated this number of tokens
    grammar: Grammar | None = None


UNCONSTRAINED = Constraints()
