"""Finds where the last tokens of a text occurred before, in the text itself or in others of the same owner.

What followed is a draft that costs no model. SuffixDecoding (Oliaro et al., 2025, arXiv 2411.04975) looks it up in
suffix trees. Here tables map the hash of the last 1, 2, 4 or 8 tokens to the latest place after such a run, as DEFLATE
does (RFC 1951, section 4): their size is fixed, and taking in a token writes one entry in each. An entry that
is overwritten, or whose text was dropped, is a match that is missed; a match is always compared token for token.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

RUNS = (1, 2, 4, 8)  # lengths of the runs that are looked up, in tokens: 3 and 16 added 0.2 % tokens a round on code
_LONGEST = RUNS[-1]
_PLACE_BITS = 32  # of an entry, which is the text's number and a place in it
_TOKEN_BYTES = 8 * len(RUNS) + array("i").itemsize  # of the tables, and of a text that has ended
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio: Fibonacci hashing (Knuth, 6.4)
_POWERS = np.cumprod(np.full(_LONGEST, _MULTIPLIER), dtype=np.uint64)
_TEXT_TOKENS = 64  # as many bytes as the rest of a text takes
_NO_TOKEN = -1  # stands before the first token


@dataclass(eq=False, slots=True)
class Text:
    """The tokens of a sequence. Other texts of the owner may be found for it."""

    owner: bytes
    token_ids: Sequence[int]  # may grow
    number: int
    num_known: int = 0  # tokens that were taken in


class Match(NamedTuple):
    """A place that follows the same run of tokens as that at the end of the text for which it was found."""

    text: Text
    place: int
    run: int  # length of the run, of `RUNS`


class SuffixIndex:
    """Index of running texts, and of the latest ones that have ended."""

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: tokens of ended texts that are kept, rounded down to a power of two; at least 1,024."""
        bits = max(10, max_tokens.bit_length() - 1)
        self.max_tokens = 1 << bits
        self.num_kept_tokens = 0  # of ended texts
        self._shift = np.uint64(64 - bits)
        self._tables = np.zeros((len(RUNS), self.max_tokens), np.int64)  # 0: no entry
        self._texts: dict[int, Text] = {}
        self._ended: dict[int, Text] = {}  # the oldest first
        self._numbers = itertools.count(1)

    @classmethod
    def of_bytes(cls, num_bytes: int) -> SuffixIndex:
        """Returns an index that takes at most about `num_bytes` in addition to the running texts."""
        return cls(num_bytes // _TOKEN_BYTES)

    def begin(self, owner: bytes, token_ids: Sequence[int]) -> Text:
        text = Text(owner, token_ids, next(self._numbers))
        self._texts[text.number] = text
        return text

    def end(self, text: Text) -> None:
        """Keeps a copy of what is known of `text`. Drops the oldest texts if there are too many tokens."""
        text.token_ids = array("i", text.token_ids[: text.num_known])
        self._ended[text.number] = text
        self.num_kept_tokens += text.num_known
        while self._ended and self.num_kept_tokens + _TEXT_TOKENS * len(self._ended) > self.max_tokens:
            oldest = next(iter(self._ended))
            self.num_kept_tokens -= self._ended.pop(oldest).num_known
            self.drop(self._texts[oldest])

    def drop(self, text: Text) -> None:
        """Forgets `text`, which must not be among the ended ones."""
        del self._texts[text.number]

    def take_in(self, texts: Iterable[tuple[Text, int]]) -> None:
        """Takes in the first tokens of each text, as many as the number says; it never falls."""
        tokens: list[int] = []
        owners: list[int] = []
        starts: list[int] = []  # in `tokens`, of the run before each new token
        entries: list[int] = []
        for text, num_tokens in texts:
            known, text.num_known = text.num_known, num_tokens
            begin = len(tokens)
            tokens += _run_before(text.token_ids, known)
            tokens += text.token_ids[known : num_tokens - 1]
            starts += range(begin, begin + num_tokens - known)
            owners += [_salt(text.owner)] * (num_tokens - known)
            number = text.number << _PLACE_BITS
            entries += range(number + known, number + num_tokens)
        if entries:
            windows = np.lib.stride_tricks.sliding_window_view(np.array(tokens, np.int64), _LONGEST)[starts]
            for table, slots in zip(self._tables, self._slots(windows, owners), strict=True):
                table[slots] = entries  # the last of equal slots stays

    def find(self, texts: Sequence[Text]) -> list[Match | None]:
        """Returns for each text the latest place after its longest run that is found; None if there is none."""
        if not texts:
            return []
        windows = np.array([_run_before(text.token_ids, len(text.token_ids)) for text in texts], np.int64)
        slots = self._slots(windows, [_salt(text.owner) for text in texts])
        found = self._tables[np.arange(len(RUNS))[:, None], slots].T.tolist()
        return [self._best(text, entries) for text, entries in zip(texts, found, strict=True)]

    def _best(self, text: Text, entries: Sequence[int]) -> Match | None:
        for run, entry in zip(reversed(RUNS), reversed(entries), strict=True):
            other, place = self._texts.get(entry >> _PLACE_BITS), entry & ((1 << _PLACE_BITS) - 1)
            if other is None or other.owner != text.owner or len(text.token_ids) < run:
                continue
            if not run <= place < len(other.token_ids):  # vLLM takes tokens back where a session goes on
                continue
            if list(other.token_ids[place - run : place]) == list(text.token_ids[-run:]):
                return Match(other, place, run)
        return None

    def _slots(self, windows: npt.NDArray[np.int64], owners: Sequence[int]) -> npt.NDArray[np.uint64]:
        """Returns the slots of the runs at the end of each window, [runs, windows]."""
        by_age = windows[:, ::-1].astype(np.uint64)
        sums = np.cumsum((by_age + np.uint64(1)) * _POWERS, axis=1, dtype=np.uint64)
        keys = sums[:, np.array(RUNS) - 1].T + np.array(owners, np.uint64)
        keys ^= keys >> np.uint64(32)
        return np.asarray(keys * _MULTIPLIER >> self._shift, np.uint64)


def following(match: Match, text: Text, number: int) -> list[int]:
    """Returns at most `number` tokens from the match on. If they reach the end of `text` itself, they go round."""
    other, place = match.text.token_ids, match.place
    tokens = list(other[place : place + number])
    period = len(other) - place
    if match.text is text:
        while len(tokens) < number:
            tokens.append(tokens[-period])
    return tokens


def _salt(owner: bytes) -> int:
    """Returns a number that keeps texts of different owners in different slots, mostly."""
    return int.from_bytes(owner[-8:])


def _run_before(token_ids: Sequence[int], place: int) -> list[int]:
    run = list(token_ids[max(0, place - _LONGEST) : place])
    return [_NO_TOKEN] * (_LONGEST - len(run)) + run
