"""Constraints of a request on its tokens, before an engine works with them. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MAX_WHITESPACE = 16  # characters between two parts of a JSON text

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
