"""Compiles grammars, and matches texts with them. What a grammar may take is counted in steps, not in seconds."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits

from cluster.constraints import Grammar
from cluster.errors import InvalidRequestError
from cluster.grammars.matcher import CompiledGrammar, Matcher
from cluster.grammars.rules import Rules
from cluster.grammars.translation import write_rules
from cluster.grammars.unique_keys import UniqueKeys
from cluster.grammars.vocabulary import Vocabulary

_MAX_ITEMS = 600  # of a parser's row: 290 optional properties of an object
_MAX_AMBIGUOUS_ITEMS = 200  # if it may be ambiguous: its masks take time in proportion to the square
_STEP_ITEMS = 10_000  # of a mask for up to 50,000 tokens; grows in proportion to larger vocabularies
_VOCAB_SIZE = 50_000
_MAX_STATES = 50_000  # of a matcher's expressions, about 1 KiB each
_MAX_REASON_CHARACTERS = 500  # llguidance quotes texts of clients
_STACK_BYTES = 512 * 2**20  # llguidance compiles rules recursively, and 2,000 in a chain take 8 MiB
_TRIAL_TOKENS = 128
"""Tokens of a text by which a grammar is tried: a very ambiguous one takes more with every token."""


_TOO_LARGE = "it is too large or too ambiguous"
T = TypeVar("T")
_starting = threading.Lock()  # the size of stacks is a setting of the process


class GrammarMatcher:
    """llguidance's matcher, in which the end of a text is a token too.

    After an error llguidance's matcher is of no use, but the error may be due to drafts that are rejected later. So a
    new one reads the text again: the text alone decides whether it exceeds the limits.
    """

    def __init__(self, compiled: LLMatcher, vocabulary: Vocabulary) -> None:
        self._compiled = compiled
        self._matcher = compiled.deep_copy()
        self._ends = vocabulary.end_token_ids
        self._token_ids: list[int] = []  # without the end
        self._has_ended = False
        self._failed: dict[tuple[int, ...], str] = {}  # reasons by the texts that have no mask

    @property
    def error(self) -> str | None:
        return self._failed.get(tuple(self._token_ids)) if self._failed else None

    def accept_token(self, token_id: int, /) -> bool:
        if self._has_ended or self.error is not None:
            return False
        if token_id in self._ends:
            self._has_ended = self._matcher.is_accepting()
            return self._has_ended
        is_accepted = self._matcher.try_consume_tokens([token_id]) == 1
        if self._matcher.is_error():
            self._read_again()
            is_accepted = self._matcher.try_consume_tokens([token_id]) == 1
            if self._matcher.is_error():
                self._read_again()
        if is_accepted:
            self._token_ids.append(token_id)
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
        self._matcher = self._compiled.deep_copy()
        self._matcher.consume_tokens(self._token_ids)


def compile_grammar(grammar: Grammar, vocabulary: Vocabulary) -> CompiledGrammar:
    """Compiles `grammar`. Raises InvalidRequestError if it is invalid, too large or too ambiguous."""
    matcher = _in_deep_thread(partial(_compile, grammar, vocabulary))
    if matcher.is_error():
        raise InvalidRequestError(f"the grammar cannot be used: {_reason(matcher)}")
    new_matcher = partial(_new_matcher, matcher, vocabulary, has_keys=grammar.form == "json_schema")
    _try(new_matcher(), vocabulary)
    return CompiledGrammar(new_matcher, json.dumps([grammar.form, grammar.text]), vocabulary.written)


def _compile(grammar: Grammar, vocabulary: Vocabulary) -> LLMatcher:
    rules = Rules()
    lark = rules.text(write_rules(rules, grammar, vocabulary))
    limits = LLParserLimits(
        max_items_in_row=_MAX_AMBIGUOUS_ITEMS if rules.may_be_ambiguous else _MAX_ITEMS,
        step_max_items=_STEP_ITEMS * max(_VOCAB_SIZE, vocabulary.vocab_size) // _VOCAB_SIZE,
        max_lexer_states=_MAX_STATES,
        verbose_errors=False,
    )
    return LLMatcher(vocabulary.tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0, limits=limits)


def _reason(matcher: LLMatcher) -> str:
    """Returns the error of `matcher` in the words of a client's grammar."""
    error = matcher.get_error()
    if "NoExtension" in error:
        return "it allows no text that this model's tokens can spell"
    if any(word in error for word in ("limit", "too many", "max is", "Too many", "panic", "too big")):
        return _TOO_LARGE
    return error.partition("\n")[0].removesuffix("<non-verbose/>").strip()[:_MAX_REASON_CHARACTERS]


def read_compiled(written: str, vocabulary: Vocabulary) -> CompiledGrammar:
    """Compiles the grammar of a CompiledGrammar's text again, in another process."""
    return compile_grammar(Grammar(*json.loads(written)), vocabulary)


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
        threading.Thread(target=run, name="grammar").start()
        threading.stack_size(before)
    return found.result()


def _new_matcher(compiled: LLMatcher, vocabulary: Vocabulary, *, has_keys: bool) -> Matcher:
    matcher = GrammarMatcher(compiled, vocabulary)
    return UniqueKeys(matcher, vocabulary.quoting_tokens) if has_keys else matcher


def _try(matcher: Matcher, vocabulary: Vocabulary) -> None:
    """Follows a text. Raises InvalidRequestError if the grammar exceeds its limits, or allows no text."""
    masks = torch.empty(1, -(-vocabulary.vocab_size // 32), dtype=torch.int32)
    ends = list(vocabulary.end_token_ids)
    for step in range(_TRIAL_TOKENS):
        masks.fill_(-1)
        matcher.fill_next_token_bitmask(masks, 0)
        if matcher.error is not None:
            raise InvalidRequestError(f"the grammar cannot be used: {matcher.error}")
        allowed = np.unpackbits(masks.numpy().view(np.uint8), count=vocabulary.vocab_size, bitorder="little")
        can_end = allowed[ends].any()
        allowed[ends] = 0
        token_ids = allowed.nonzero()[0]
        if not len(token_ids):
            if can_end:
                return
            raise InvalidRequestError(
                "the grammar cannot be used: it allows no text that this model's tokens can spell"
            )
        if not matcher.accept_token(int(token_ids[step * 7919 % len(token_ids)])):
            raise InvalidRequestError(f"the grammar cannot be used: {_TOO_LARGE}")
