"""Encodes bytes as token IDs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property

from cluster.tokenization import Tokenizer


class ByteEncoder:
    """Encodes bytes with a subset of the tokens. Bytes may begin or end inside a character."""

    def __init__(self, tokenizer: Tokenizer, usable: Collection[int]) -> None:
        """`usable`: IDs of the tokens that may be used."""
        self._tokenizer, self._usable = tokenizer, usable

    def encode(self, spelling: bytes) -> list[int]:
        """Returns tokens whose bytes together are `spelling`; an empty list if there are none."""
        try:
            token_ids = self._tokenizer.encode(spelling.decode(), add_special_tokens=False)
        except UnicodeDecodeError:  # the bytes begin or end inside a character
            token_ids = []
        # Some tokenizers add a space or normalise the text.
        is_exact = b"".join(map(self._tokenizer.token_bytes, token_ids)) == spelling
        if is_exact and all(token_id in self._usable for token_id in token_ids):
            return token_ids
        return self.longest_matches(spelling)

    def longest_matches(self, spelling: bytes) -> list[int]:
        """Returns the longest token that begins `spelling`, then the longest that begins the rest, and so on."""
        found, start = [], 0
        while start < len(spelling):
            ends = range(min(len(spelling), start + self._longest), start, -1)
            end = next((end for end in ends if spelling[start:end] in self._ids), None)
            if end is None:
                return []
            found.append(self._ids[spelling[start:end]])
            start = end
        return found

    @cached_property
    def _ids(self) -> Mapping[bytes, int]:
        """Usable IDs by bytes, without special tokens."""
        special = frozenset(self._tokenizer.special_tokens.values())
        usable = [i for i in reversed(self._tokenizer.token_ids) if i in self._usable and i not in special]
        # Byte tokens come first, because the dictionary keeps the last token with the same bytes.
        usable.sort(key=self._tokenizer.is_byte_token, reverse=True)
        return {self._tokenizer.token_bytes(token_id): token_id for token_id in usable}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids), default=0)
