"""Grammars that were compiled, and matchers of them."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
import xgrammar

from cluster.errors import InvalidRequestError
from cluster.grammars.matcher import Matcher

_PROBE_TOKENS = 128  # of each text
_PROBE_SECONDS = 0.02
"""Of the longest step of a trial: a grammar that is so ambiguous takes longer with every token."""


def read_vocabulary(written: str) -> xgrammar.TokenizerInfo:
    """As the process that compiles wrote it."""
    return xgrammar.TokenizerInfo.deserialize_json(written)


def read_compiled(written: str, vocabulary: xgrammar.TokenizerInfo) -> xgrammar.CompiledGrammar:
    """As the process that compiles wrote it."""
    return xgrammar.CompiledGrammar.deserialize_json(written, vocabulary)


def make_matcher(compiled: xgrammar.CompiledGrammar) -> Matcher:
    """At the beginning of the text of the grammar `compiled`."""
    # A model that has no token to end with: the text ends as soon as the grammar could end it.
    matcher: Matcher = xgrammar.GrammarMatcher(
        compiled, terminate_without_stop_token=not compiled.tokenizer_info.stop_token_ids
    )
    return matcher


def probe(compiled: xgrammar.CompiledGrammar) -> None:
    """Follows two texts of the grammar for a while. Raises InvalidRequestError where a step takes too long, or where no
    token can follow."""
    _follow(compiled, lambda step: 0)
    _follow(compiled, lambda step: step * 7919)


def _follow(compiled: xgrammar.CompiledGrammar, choose: Callable[[int], int]) -> None:
    """Of the tokens that go on after so many steps, the one that `choose` says comes next."""
    vocab_size = compiled.tokenizer_info.vocab_size
    matcher, ends = make_matcher(compiled), set(compiled.tokenizer_info.stop_token_ids)
    bits = torch.empty(1, -(-vocab_size // 32), dtype=torch.int32)
    for step in range(_PROBE_TOKENS):
        bits.fill_(-1)
        started_at = time.thread_time()
        matcher.fill_next_token_bitmask(bits, 0)
        if time.thread_time() - started_at > _PROBE_SECONDS:
            raise InvalidRequestError("the grammar is too ambiguous: what may follow takes too long to work out")
        bytes_of_bits = np.unpackbits(bits.numpy().view(np.uint8), bitorder="little")
        allowed = bytes_of_bits[:vocab_size].nonzero()[0].tolist()
        if not allowed:
            raise InvalidRequestError("the grammar allows no text that this model's tokens can spell")
        going_on = [token for token in allowed if token not in ends]
        if not going_on:
            return
        matcher.accept_token(going_on[choose(step) % len(going_on)])
