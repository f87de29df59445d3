"""Forbids repeated keys within an object of a JSON text. Grammars can do this only for listed keys."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from cluster.grammars.matcher import Matcher

TokenIds = npt.NDArray[np.int64]

_QUOTE, _BACKSLASH, _COLON, _COMMA = b'"\\:,'
_OPENING, _CLOSING = b"{[", b"}]"


@dataclass(frozen=True, slots=True)
class _Container:
    """An object or array that is not closed yet."""

    outer: _Container | None
    is_object: bool
    expects_key: bool
    keys: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _Place:
    """A place in a JSON text."""

    container: _Container | None = None
    is_in_string: bool = False
    is_escaped: bool = False  # the next byte follows a backslash
    key: bytes | None = None  # the written part of the current key; None: the place is not in a key

    def after(self, text: bytes) -> _Place | None:
        """Returns the place after `text`; None if `text` completes a key that its object already has."""
        place: _Place | None = self
        for byte in text:
            assert place is not None
            place = place._in_string(byte) if place.is_in_string else place._between(byte)
            if place is None:
                return None
        return place

    def _in_string(self, byte: int) -> _Place | None:
        if byte != _QUOTE or self.is_escaped:
            key = None if self.key is None else self.key + bytes((byte,))
            return _Place(self.container, True, byte == _BACKSLASH and not self.is_escaped, key)
        if self.key is None or self.container is None:
            return _Place(self.container)
        name = _name(self.key)
        if name in self.container.keys:
            return None
        return _Place(replace(self.container, keys=self.container.keys | {name}))

    def _between(self, byte: int) -> _Place:
        container = self.container
        if byte == _QUOTE:
            is_key = container is not None and container.expects_key
            return _Place(container, True, False, b"" if is_key else None)
        if byte in _OPENING:
            is_object = byte == _OPENING[0]
            return _Place(_Container(container, is_object, is_object))
        if container is None:
            return self
        if byte in _CLOSING:
            return _Place(container.outer)
        if byte in (_COLON, _COMMA):
            return _Place(replace(container, expects_key=container.is_object and byte == _COMMA))
        return self


def _name(key: bytes) -> str:
    """Returns the key with its escapes decoded, as a parser reads it."""
    text = key.decode(errors="replace")
    try:
        return str(json.loads(f'"{text}"')) if "\\" in text else text
    except ValueError:  # the escape is incomplete
        return text


class QuotingTokens:
    """The tokens of a vocabulary that can complete a key."""

    def __init__(self, spelled: Sequence[bytes]) -> None:
        self.spelled = spelled
        with_quote = [(token_id, text) for token_id, text in enumerate(spelled) if _QUOTE in text]
        self._all = _ids(token_id for token_id, _ in with_quote)
        self._with_several = _ids(token_id for token_id, text in with_quote if text.count(_QUOTE) > 1)
        self._with_escape = _ids(token_id for token_id, text in with_quote if _BACKSLASH in text)
        endings: defaultdict[bytes, list[int]] = defaultdict(list)
        for token_id, text in with_quote:
            endings[text.partition(b'"')[0]].append(token_id)
        self._endings = {ending: _ids(token_ids) for ending, token_ids in endings.items()}

    def that_may_repeat(self, place: _Place) -> TokenIds:
        """Returns the tokens that may complete a key at `place` that its object already has."""
        # Tokens with two quotes may contain a whole key.
        candidates = [self._with_several]
        if place.key is not None and place.container is not None:
            candidates += self._endings_of(place.key, place.is_escaped, place.container.keys)
        return np.concatenate(candidates)

    def _endings_of(self, begun: bytes, is_escaped: bool, keys: Collection[str]) -> list[TokenIds]:
        """Returns the tokens that may complete the key `begun` to one of `keys`."""
        text = begun.decode(errors="replace")
        if is_escaped or "�" in text or "\\" in text:
            return [self._all] if keys else []
        rests = [key[len(text) :].encode(errors="replace") for key in keys if key.startswith(text)]
        found = [self._endings[rest] for rest in rests if rest in self._endings]
        return [*found, self._with_escape] if rests else []


class UniqueKeys:
    """Wraps the matcher of a JSON grammar, and also forbids repeating a key within an object."""

    def __init__(self, matcher: Matcher, tokens: QuotingTokens) -> None:
        self._matcher = matcher
        self._tokens = tokens
        self._places = [_Place()]  # the state after each token

    def accept_token(self, token_id: int, /) -> bool:
        place = self._places[-1].after(self._tokens.spelled[token_id])
        if place is None or not self._matcher.accept_token(token_id):
            return False
        self._places.append(place)
        return True

    @property
    def error(self) -> str | None:
        return self._matcher.error

    @property
    def refused_because(self) -> str | None:
        return self._matcher.refused_because

    def rollback(self, num_tokens: int, /) -> None:
        self._matcher.rollback(num_tokens)
        del self._places[len(self._places) - num_tokens :]

    def is_terminated(self) -> bool:
        return self._matcher.is_terminated()

    def likely_token_ids(self, most: int, /) -> Sequence[int]:
        return self._matcher.likely_token_ids(most)

    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int, /) -> bool:
        is_limited = self._matcher.fill_next_token_bitmask(bitmask, index)
        place = self._places[-1]
        bits: npt.NDArray[np.uint32] = bitmask[index].numpy().view(np.uint32)
        candidates = self._tokens.that_may_repeat(place)
        allowed = candidates[(bits[candidates >> 5] >> (candidates & 31).astype(np.uint32)) & 1 == 1]
        for token_id in allowed.tolist():
            if place.after(self._tokens.spelled[token_id]) is None:
                bits[token_id >> 5] &= np.uint32(~(1 << (token_id & 31)) & 0xFFFFFFFF)
                is_limited = True
        return is_limited


def _ids(token_ids: Iterable[int]) -> TokenIds:
    return np.fromiter(token_ids, dtype=np.int64)
