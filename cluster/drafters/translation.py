"""Translates between the target's tokens and those of a draft model whose tokenizer cuts text at other places."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cluster.byte_encoder import ByteEncoder
from cluster.vocabulary_map import VocabularyMap

_NUM_UNCERTAIN_WORDS = 4  # words at the end of a text that may be cut differently once the text continues
_CACHE_SIZE = 1 << 16
MAX_PIECES = 8  # maximum target tokens kept per draft token; few have more


class Word(NamedTuple):
    """A part of a text; no draft token spans two of them."""

    token_ids: list[int]  # the draft's
    num_bytes: int


class Translation:
    """Translates draft tokens to target tokens, and back. Equal bytes mean equal text.

    A special token is translated to the special token with the same role or spelling. If there is none, the draft reads
    the token's spelling and never proposes the token.
    """

    def __init__(self, vocabulary: VocabularyMap) -> None:
        target, draft = vocabulary.target, vocabulary.draft
        self._target, self._draft = target, draft
        self._special = frozenset(target.added_tokens)
        self._draft_ids = vocabulary.pairs
        target_ids = {draft_id: token_id for token_id, draft_id in vocabulary.pairs.items()}
        self._to_target = ByteEncoder(target, frozenset(target.token_ids))
        self._to_draft = ByteEncoder(draft, {i for i in draft.token_ids if i < vocabulary.num_rows})
        unreadable = [bytes([byte]) for byte in range(128) if not self._to_draft.longest_matches(bytes([byte]))]
        self._unreadable = re.compile(b"([" + re.escape(b"".join(unreadable)) + b"])" if unreadable else b"(?!)")
        self.num_target_ids = 1 + target.token_ids[-1]
        self.pieces: npt.NDArray[np.int64] = np.full((vocabulary.num_rows, MAX_PIECES), -1)
        "By draft ID: its first target tokens, padded with -1, [num_rows, MAX_PIECES]."
        self.draft_ids: npt.NDArray[np.int64] = np.arange(vocabulary.num_rows)
        self.spellings = [b""] * vocabulary.num_rows
        "By draft ID: the bytes of its target tokens."
        for draft_id in draft.token_ids:
            if draft_id < vocabulary.num_rows:
                pieces = self._pieces_of(draft_id, target_ids)
                self.pieces[draft_id, : len(pieces)] = pieces[:MAX_PIECES]
                self.spellings[draft_id] = self.token_bytes(pieces)
        self.joined = lru_cache(_CACHE_SIZE)(self._joined)

    def is_special(self, token_id: int) -> bool:
        """Returns True if the target's token never merges with text around it."""
        return token_id in self._special

    def token_bytes(self, token_ids: Sequence[int]) -> bytes:
        """Returns the bytes of the target's `token_ids`."""
        return b"".join(map(self._target.token_bytes, token_ids))

    def target_ids(self, text: bytes) -> list[int]:
        """Returns the target's tokens of `text`."""
        return self._to_target.encode(text)

    def _pieces_of(self, draft_id: int, target_ids: Mapping[int, int]) -> list[int]:
        """Returns the target's tokens of a draft token. `target_ids`: the tokens that both have, by the draft's ID."""
        if draft_id in self._draft.added_tokens:
            return [target_ids[draft_id]] if draft_id in target_ids else []
        return self._to_target.encode(self._draft.token_bytes(draft_id))

    def _joined(self, token_id: int, draft_id: int) -> tuple[int, ...]:
        """Returns the target's tokens of the target's `token_id` followed by the text of `draft_id`.

        Returns only `token_id` if one of them is special; at most MAX_PIECES tokens.
        """
        if self.is_special(token_id) or self.is_special(int(self.pieces[draft_id, 0])):
            return (token_id,)
        return tuple(self._to_target.encode(self.token_bytes([token_id]) + self.spellings[draft_id])[:MAX_PIECES])

    def special_draft_ids(self, token_id: int) -> list[int]:
        """Returns the draft's tokens for a special token of the target."""
        if token_id in self._draft_ids:
            return [self._draft_ids[token_id]]
        return self._to_draft.encode(self._target.token_bytes(token_id))

    def draft_words(self, text: bytes) -> list[Word]:
        """Returns the words of `text`. Invalid UTF-8, and ASCII bytes without a token, are words of their own."""
        words: list[Word] = []
        for part in self._unreadable.split(text):
            while part:
                try:
                    words += self._words_of(part)
                    break
                except UnicodeDecodeError as error:
                    words += self._words_of(part[: error.start])
                    words.append(self._spelled(part[error.start : error.end]))
                    part = part[error.end :]
        return words

    def _words_of(self, text: bytes) -> list[Word]:
        token_bytes = self._draft.token_bytes
        found = self._draft.encode_words(text.decode())
        words = [Word(ids, sum(len(token_bytes(token_id)) for token_id in ids)) for ids in found]
        if sum(word.num_bytes for word in words) == len(text):
            return words
        return [self._spelled(line) for line in text.splitlines(keepends=True)]  # the tokenizer normalises the text

    def _spelled(self, text: bytes) -> Word:
        return Word(self._to_draft.longest_matches(text), len(text))


class DraftText:
    """Text that grows by target tokens, encoded by the draft's tokenizer.

    The tokenizer may cut the last words differently once the text continues. The first `num_certain` tokens never
    change, so only the text after them is encoded again. An unfinished character is spelled in tokens of its bytes.
    """

    def __init__(self, translation: Translation) -> None:
        self.token_ids: list[int] = []
        self.num_certain = 0
        self._translation = translation
        self._rest = b""  # text of the tokens that are not certain

    def append(self, token_ids: Sequence[int]) -> None:
        """Adds the target's `token_ids`. Padding adds nothing."""
        translation = self._translation
        del self.token_ids[self.num_certain :]
        parts: list[bytes] = []
        for token_id in token_ids:
            if translation.is_special(token_id):
                self._encode(b"".join(parts), ends=True)
                parts.clear()
                self.token_ids += translation.special_draft_ids(token_id)
                self.num_certain = len(self.token_ids)
            else:
                parts.append(translation.token_bytes([token_id]))
        self._encode(b"".join(parts), ends=False)

    def _encode(self, text: bytes, *, ends: bool) -> None:
        """Adds `text`. `ends`: whether a special token follows."""
        words = self._translation.draft_words(self._rest + text)
        num_certain = len(words) if ends else max(0, len(words) - _NUM_UNCERTAIN_WORDS)
        self._rest = (self._rest + text)[sum(word.num_bytes for word in words[:num_certain]) :]
        for word in words[:num_certain]:
            self.token_ids += word.token_ids
        self.num_certain = len(self.token_ids)
        for word in words[num_certain:]:
            self.token_ids += word.token_ids
