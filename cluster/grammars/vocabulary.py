"""The tokens of a model, as grammars see them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from llguidance import LLTokenizer

from cluster.grammars.unique_keys import QuotingTokens


class Vocabulary:
    """The texts of tokens. Special tokens have none: grammars allow them only by their IDs."""

    def __init__(self, tokenizer: str, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        """`tokenizer`: the text of tokenizer.json. The model has `vocab_size` logits; `end_token_ids` end a text."""
        self._tokenizer = tokenizer
        self.written = json.dumps([tokenizer, vocab_size, list(end_token_ids)])
        self.vocab_size = vocab_size
        self.end_token_ids = frozenset(end_token_ids)
        self.tokenizer = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(end_token_ids) or None)

    @classmethod
    def of_model(cls, folder: Path, vocab_size: int, end_token_ids: Sequence[int]) -> Vocabulary:
        return cls((folder / "tokenizer.json").read_text(encoding="utf-8"), vocab_size, end_token_ids)

    @classmethod
    def read(cls, written: str) -> Vocabulary:
        return cls(*json.loads(written))

    @cached_property
    def special_texts(self) -> list[str]:
        """The texts that special tokens have elsewhere."""
        added = json.loads(self._tokenizer).get("added_tokens", ())
        return [token["content"] for token in added if token["special"]]

    @cached_property
    def quoting_tokens(self) -> QuotingTokens:
        return QuotingTokens([self.tokenizer.decode_bytes([token]) for token in range(self.vocab_size)])
