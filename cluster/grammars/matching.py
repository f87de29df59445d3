"""Compiles grammars with llguidance, and matches texts with them.

Limits count items of the parser and states of the lexer, so that they are the same on every machine.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits

from cluster.constraints import Grammar
from cluster.grammars.matcher import CompiledGrammar, Matcher
from cluster.grammars.rules import invalid_grammar
from cluster.grammars.translation import to_lark
from cluster.grammars.unique_keys import UniqueKeys
from cluster.grammars.vocabulary import Vocabulary

_MAX_ITEMS = 600  # of a parser's row: 290 optional properties; an ambiguous grammar takes 0.1 s a mask at most
_STEP_ITEMS = 10_000  # of a mask for up to 50,000 tokens; grows in proportion to larger vocabularies
_VOCAB_SIZE = 50_000
_MAX_STATES = 50_000  # of the expressions of one request, about 1 KiB each
_TRIAL_TOKENS = 32  # of a text by which a grammar is tried
_MAX_REASON_CHARACTERS = 500  # llguidance quotes texts of clients
_STACK_BYTES = 512 * 2**20  # llguidance compiles rules recursively, and 2,000 in a chain take 8 MiB
_TOO_LARGE = "it is too large or too ambiguous"
_NO_TEXT = "it allows no text that this model's tokens can spell"
T = TypeVar("T")
_starting = threading.Lock()  # the size of stacks is a setting of the process


@dataclass(frozen=True, slots=True)
class Rulebook:
    """The rules of a grammar in llguidance's form. To compile them takes milliseconds, and a second at most."""

    rules: str
    has_keys: bool  # a JSON text, in which keys may not repeat

    def write(self) -> str:
        return json.dumps([self.rules, self.has_keys])

    @classmethod
    def read(cls, written: str) -> Rulebook:
        return cls(*json.loads(written))

    def start(self, vocabulary: Vocabulary) -> LLMatcher:
        """Returns a matcher with states of its own: copies of a matcher share its states, which only grow."""
        limits = LLParserLimits(
            max_items_in_row=_MAX_ITEMS,
            step_max_items=_STEP_ITEMS * max(_VOCAB_SIZE, vocabulary.vocab_size) // _VOCAB_SIZE,
            max_lexer_states=_MAX_STATES,
            verbose_errors=False,
        )
        return _in_deep_thread(lambda: LLMatcher(vocabulary.tokenizer, self.rules, log_level=0, limits=limits))


class GrammarMatcher:
    """llguidance's matcher, in which the end of a text is a token too.

    After an error llguidance's matcher cannot be used, but the error may come from drafts that are rejected later. Then
    a new matcher reads the committed tokens again.
    """

    def __init__(self, rulebook: Rulebook, vocabulary: Vocabulary, matcher: LLMatcher) -> None:
        """`matcher`: a matcher of `rulebook` at the beginning of the text."""
        self._rulebook = rulebook
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._ends = vocabulary.end_token_ids
        self._token_ids: list[int] = []  # without the end
        self._has_ended = False
        self.refused_because: str | None = None
        self._failed: dict[tuple[int, ...], str] = {}  # reasons by the texts that exceed the limits

    @property
    def error(self) -> str | None:
        return self._failed.get(tuple(self._token_ids)) if self._failed else None

    def accept_token(self, token_id: int, /) -> bool:
        self.refused_because = None
        if self._has_ended or self.error is not None:
            return False
        if token_id in self._ends:
            self._has_ended = self._matcher.is_accepting()
            return self._has_ended
        if not self._consume(token_id):
            return False
        self._token_ids.append(token_id)
        return True

    def _consume(self, token_id: int) -> bool:
        is_accepted = self._matcher.try_consume_tokens([token_id]) == 1
        if self._matcher.is_error():
            self._read_again()
            is_accepted = self._matcher.try_consume_tokens([token_id]) == 1
            if self._matcher.is_error():
                self.refused_because = _reason(self._matcher)
                self._read_again()
        return is_accepted

    def rollback(self, num_tokens: int, /) -> None:
        if num_tokens and self._has_ended:
            self._has_ended = False
            num_tokens -= 1
        if num_tokens:
            del self._token_ids[-num_tokens:]
            self._matcher.rollback(num_tokens)

    def is_terminated(self) -> bool:
        # If the model has no end token, the text ends as soon as the grammar allows.
        return self._has_ended or (not self._ends and self._matcher.is_accepting())

    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int, /) -> bool:
        row = bitmask[index]
        for _ in range(2):
            self._matcher.unsafe_compute_mask_ptr(row.data_ptr(), row.numel() * row.element_size())
            if not self._matcher.is_error():
                return True
            reason = _reason(self._matcher)
            self._read_again()
        self._failed[tuple(self._token_ids)] = reason
        row.fill_(-1)
        return False

    def likely_token_ids(self, most: int, /) -> list[int]:
        """Returns tokens that spell the only text that the grammar allows."""
        found = self._matcher.compute_ff_tokens()[:most]
        if self._matcher.is_error():
            self._read_again()
            return []
        return found

    def _read_again(self) -> None:
        self._matcher = self._rulebook.start(self._vocabulary)
        self._matcher.consume_tokens(self._token_ids)


def write_rulebook(grammar: Grammar, vocabulary: Vocabulary) -> Rulebook:
    """Returns the rules of `grammar`. Raises InvalidRequestError if it is invalid, too large or too ambiguous."""
    rules = LLMatcher.grammar_from_lark(to_lark(grammar, vocabulary))
    rulebook = Rulebook(rules, grammar.form == "json_schema")
    _try(compile_rulebook(rulebook, vocabulary).new_matcher(), vocabulary)
    return rulebook


def compile_rulebook(rulebook: Rulebook, vocabulary: Vocabulary) -> CompiledGrammar:
    """Compiles `rulebook` for one request. Raises InvalidRequestError if its rules are invalid or too large."""
    matcher = rulebook.start(vocabulary)
    if matcher.is_error():
        raise invalid_grammar(_reason(matcher))
    return CompiledGrammar(partial(_new_matcher, rulebook, vocabulary, matcher), rulebook.write(), vocabulary.written)


def compile_grammar(grammar: Grammar, vocabulary: Vocabulary) -> CompiledGrammar:
    """Compiles `grammar` for one request. Raises InvalidRequestError as `write_rulebook` does."""
    return compile_rulebook(write_rulebook(grammar, vocabulary), vocabulary)


def read_compiled(written: str, vocabulary: Vocabulary) -> CompiledGrammar:
    """Compiles the grammar of a CompiledGrammar's text again, in another process."""
    return compile_rulebook(Rulebook.read(written), vocabulary)


def _reason(matcher: LLMatcher) -> str:
    """Returns the error of `matcher` in the words of a client's grammar."""
    error = matcher.get_error().removesuffix("<non-verbose/>").strip()
    if "NoExtension" in error:
        return _NO_TEXT
    if any(word in error for word in ("limit", "too many", "max is", "Too many", "panic", "too big", "fuel")):
        return _TOO_LARGE
    # The reason for an invalid expression is in the last line, after the place.
    return (error.rpartition("\nerror: ")[2] if "\nerror: " in error else error.partition("\n")[0])[
        :_MAX_REASON_CHARACTERS
    ]


def _in_deep_thread(call: Callable[[], T]) -> T:
    """Returns what `call` returns in a thread with a large stack."""
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(call())
        except BaseException as error:
            found.set_exception(error)

    with _starting:
        before = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=run, name="grammar").start()
        finally:
            threading.stack_size(before)
    return found.result()


def _new_matcher(rulebook: Rulebook, vocabulary: Vocabulary, template: LLMatcher) -> Matcher:
    matcher = GrammarMatcher(rulebook, vocabulary, template.deep_copy())
    return UniqueKeys(matcher, vocabulary.quoting_tokens) if rulebook.has_keys else matcher


def _try(matcher: Matcher, vocabulary: Vocabulary) -> None:
    """Follows a text. Raises InvalidRequestError if the grammar exceeds its limits, or allows no text."""
    masks = torch.empty(1, -(-vocabulary.vocab_size // 32), dtype=torch.int32)
    ends = list(vocabulary.end_token_ids)
    for step in range(_TRIAL_TOKENS):
        if matcher.is_terminated():
            return
        masks.fill_(-1)
        matcher.fill_next_token_bitmask(masks, 0)
        if matcher.error is not None:
            raise invalid_grammar(matcher.error)
        allowed = np.unpackbits(masks.numpy().view(np.uint8), count=vocabulary.vocab_size, bitorder="little")
        can_end = allowed[ends].any()
        allowed[ends] = 0
        token_ids = allowed.nonzero()[0]
        if not len(token_ids):
            if can_end:
                return
            raise invalid_grammar(_NO_TEXT)
        if not matcher.accept_token(int(token_ids[step * 7919 % len(token_ids)])):
            raise invalid_grammar(_TOO_LARGE)
