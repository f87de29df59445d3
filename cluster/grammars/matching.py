"""Compiled grammars and their matchers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
import torch
import xgrammar

from cluster.constraints import GrammarForm
from cluster.errors import InvalidRequestError
from cluster.grammars.matcher import Matcher
from cluster.grammars.unique_keys import QuotingTokens, UniqueKeys

_PROBE_TOKENS = 128  # tokens per text
_PROBE_SECONDS = 0.02
"Time limit of the longest step of a trial: a very ambiguous grammar takes longer with every token."


class Vocabulary:
    """The texts of a model's tokens."""

    def __init__(self, info: xgrammar.TokenizerInfo) -> None:
        self.info = info

    @cached_property
    def quoting_tokens(self) -> QuotingTokens:
        return QuotingTokens(self.info.decoded_vocab)

    @cached_property
    def _by_text(self) -> dict[bytes, int]:
        return {text: token_id for token_id, text in enumerate(self.info.decoded_vocab) if text}

    @cached_property
    def _max_bytes(self) -> int:
        return max(map(len, self._by_text), default=0)

    def spell(self, text: bytes, most: int) -> list[int]:
        """Returns at most `most` tokens that spell the beginning of `text`. Each token is the longest that fits."""
        token_ids: list[int] = []
        start = 0
        while start < len(text) and len(token_ids) < most:
            ends = range(min(len(text), start + self._max_bytes), start, -1)
            end = next((end for end in ends if text[start:end] in self._by_text), None)
            if end is None:
                break
            token_ids.append(self._by_text[text[start:end]])
            start = end
        return token_ids


@dataclass(frozen=True)
class ReadGrammar:
    """A compiled grammar, as matchers need it."""

    compiled: xgrammar.CompiledGrammar
    vocabulary: Vocabulary
    form: GrammarForm

    def write(self) -> str:
        """Returns the grammar as text, for `read_compiled`."""
        return f"{self.form}\n{self.compiled.serialize_json()}"


def read_vocabulary(written: str) -> Vocabulary:
    """Reads the vocabulary from the text that the compiling process wrote."""
    return Vocabulary(xgrammar.TokenizerInfo.deserialize_json(written))


def read_compiled(written: str, vocabulary: Vocabulary) -> ReadGrammar:
    """Reads a grammar from the text that the compiling process wrote."""
    form, _, text = written.partition("\n")
    compiled = xgrammar.CompiledGrammar.deserialize_json(text, vocabulary.info)
    return ReadGrammar(compiled, vocabulary, cast(GrammarForm, form))


class GrammarMatcher(xgrammar.GrammarMatcher):
    """xgrammar's matcher, which also guesses the next tokens."""

    def __init__(self, grammar: ReadGrammar) -> None:
        # If the model has no end token, the text ends as soon as the grammar allows.
        ends_early = not grammar.vocabulary.info.stop_token_ids
        super().__init__(grammar.compiled, terminate_without_stop_token=ends_early)
        self._vocabulary = grammar.vocabulary

    def likely_token_ids(self, most: int, /) -> list[int]:
        """Returns the longest tokens that spell the only text that the grammar allows.

        Omits the last of several tokens: a model often chooses a longer token in its place, which extends beyond that
        text. In answers for 50 schemas (SmolLM2-135M) 86 % of the guesses are right without it, and 64 % with it.
        """
        try:
            text = self.find_jump_forward_string()
        except UnicodeDecodeError:  # the answer ends inside a character: xgrammar's text begins with the rest of it
            return []
        token_ids = self._vocabulary.spell(text.encode(), most + 1)
        return token_ids[:-1] if len(token_ids) > 1 else token_ids[:most]


def make_matcher(grammar: ReadGrammar) -> Matcher:
    """Returns a matcher at the beginning of the text of `grammar`."""
    matcher = GrammarMatcher(grammar)
    return UniqueKeys(matcher, grammar.vocabulary.quoting_tokens) if grammar.form == "json_schema" else matcher


def probe(grammar: ReadGrammar) -> None:
    """Tries the first `_PROBE_TOKENS` tokens of two texts of the grammar.

    Raises InvalidRequestError if a step takes too long, or if no token can follow.
    """
    _follow(grammar, lambda step: 0)
    _follow(grammar, lambda step: step * 7919)


def _follow(grammar: ReadGrammar, choose: Callable[[int], int]) -> None:
    """Tries a text of `grammar` whose tokens `choose` selects. Raises InvalidRequestError as `probe` does."""
    vocab_size = grammar.vocabulary.info.vocab_size
    matcher, ends = make_matcher(grammar), set(grammar.vocabulary.info.stop_token_ids)
    bits = torch.empty(1, -(-vocab_size // 32), dtype=torch.int32)
    for step in range(_PROBE_TOKENS):
        bits.fill_(-1)
        started_at = time.thread_time()
        matcher.fill_next_token_bitmask(bits, 0)
        if time.thread_time() - started_at > _PROBE_SECONDS:
            raise InvalidRequestError("the grammar is too ambiguous: computing the possible next tokens takes too long")
        bytes_of_bits = np.unpackbits(bits.numpy().view(np.uint8), bitorder="little")
        allowed = bytes_of_bits[:vocab_size].nonzero()[0].tolist()
        if not allowed:
            raise InvalidRequestError("the grammar allows no text that this model's tokens can spell")
        going_on = [token for token in allowed if token not in ends]
        if not going_on:
            return
        matcher.accept_token(going_on[choose(step) % len(going_on)])
