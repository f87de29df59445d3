"""A model whose tokens are drawn at random among those that a grammar allows."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from cluster.config import Config
from cluster.constraints import Grammar
from cluster.grammars.matching import compile_grammar
from cluster.grammars.unique_keys import UniqueKeys
from cluster.grammars.vocabulary import Vocabulary
from cluster.model_folder import resolve_model_folder
from cluster.tokenization import Tokenizer

END = 0
_MAX_TOKENS = 400
_FREE_TOKENS = 40  # before the model heads for an end
_PREFERENCE = ("}]", '"', ":", ",", "truefalsn-0123456789", "{[", " \t\r\n")  # first characters, on the way to an end


class RandomModel:
    """Answers in the vocabulary of the bundled model."""

    def __init__(self, seed: int) -> None:
        folder = resolve_model_folder(Config().target.model)
        self._vocabulary = Vocabulary.of_model(folder, Tokenizer(folder).vocab_size, [END])
        self._spelled = self._vocabulary.quoting_tokens.spelled
        self._rng = random.Random(seed)

    def answer(self, schema: Mapping[str, Any]) -> str | None:
        """Returns a text that the grammar of `schema` allows; None if it does not end in time."""
        matcher = compile_grammar(Grammar("json_schema", json.dumps(schema)), self._vocabulary).new_matcher()
        assert isinstance(matcher, UniqueKeys)
        bits = torch.empty(1, -(-self._vocabulary.vocab_size // 32), dtype=torch.int32)
        text = b""
        for step in range(_MAX_TOKENS):
            bits.fill_(-1)
            matcher.fill_next_token_bitmask(bits, 0)
            allowed = np.unpackbits(bits.numpy().view(np.uint8), bitorder="little").nonzero()[0]
            if matcher._places[-1].key and not len(allowed):
                return None  # a short key that can only be repeated
            assert len(allowed), (schema, text)
            is_ending = step >= _FREE_TOKENS
            if END in allowed and (is_ending or len(allowed) == 1 or self._rng.random() < 0.5):
                return text.decode(errors="replace")
            token = self._choose(allowed, is_ending=is_ending, is_in_string=matcher._places[-1].is_in_string)
            assert matcher.accept_token(token)
            text += self._spelled[token]
        return None

    def _choose(self, allowed: Any, *, is_ending: bool, is_in_string: bool) -> int:
        going_on = [int(token) for token in allowed if token != END]
        if not is_ending:
            # Short tokens have the syntax of JSON; among all of them it would be rare.
            short = [token for token in going_on if len(self._spelled[token]) == 1]
            return self._rng.choice(short if short and self._rng.random() < 0.7 else going_on)
        preferred = {token: self._rank(self._spelled[token], is_in_string=is_in_string) for token in going_on}
        best = min(preferred.values())
        return self._rng.choice([token for token, rank in preferred.items() if rank == best])

    def _rank(self, text: bytes, *, is_in_string: bool) -> int:
        if is_in_string:
            return int(text[:1] != b'"') + int(b"\\" in text)
        first = text[:1].decode(errors="replace")
        return next((rank for rank, characters in enumerate(_PREFERENCE) if first and first in characters), 9)
