"""Encodes a client's text as text, even where it spells a special token.

Only the chat template may write special tokens. A user who could write `<|im_end|>` would end the message, and could
begin a system message with `<|im_start|>system`. So before a template is rendered, a stand-in character replaces the
first character of every special token in the client's text. The tokenizer finds the remaining special tokens, and then
restores the replaced characters. A stand-in is one character, so a template may cut, measure or escape its input.

A special token may also be split between two strings that a template writes one after the other, or between a string
and the template's own text. So a string that ends with the beginning of a token, or begins with the end of one, gets a
stand-in for the first character of that part.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from cluster.errors import InvalidRequestError

V = TypeVar("V")

Run = Sequence[str]
"""Strings that a template may write one after the other."""

# Characters without a meaning, which serve as stand-ins; those with the shortest JSON escapes come first.
_PRIVATE_USE = (slice(0xE000, 0xF900), slice(0xF0000, 0xFFFFE), slice(0x100000, 0x10FFFE))
_PIECE = 2**16  # characters of a text to look at in one call, which keeps the event loop waiting for up to 1 ms
_ESCAPES = re.compile(r"\\u[0-9a-f]{4}")  # in JSON; characters beyond 0xFFFF have two


class SpecialTokenGuard:
    def __init__(self, special_tokens: Collection[str]) -> None:
        # The pattern matches only a token's first character, which makes the search fast. The rest is a look-ahead, so
        # that overlapping tokens are all found.
        alternatives = "|".join(
            re.escape(first) + f"(?={'|'.join(re.escape(token[1:]) for token in sorted(tokens))})"
            for first, tokens in itertools.groupby(sorted(filter(None, special_tokens)), key=lambda token: token[0])
        )
        self._spelled = re.compile(alternatives) if alternatives else None
        cuts = [(token[:cut], token[cut:]) for token in special_tokens for cut in range(1, len(token))]
        self._beginnings = _Pieces(before for before, _ in cuts)
        self._ends = _Pieces(after for _, after in cuts)

    def disguise(self, value: V, *, avoid: str) -> tuple[V, dict[str, str]]:
        """Returns the JSON value `value` with stand-ins, and the character that each stand-in replaces.

        If `value` spells no special token, returns `value` itself and no stand-ins. Stand-ins are characters that occur
        neither in `value` nor in `avoid`, the rest of the text that will be rendered.
        Raises InvalidRequestError if no such character is left.
        """
        if not any(map(self._places, _runs(value))):
            return value, {}
        import numpy as np  # a router whose clients never spell a special token starts and runs without it

        private_use = np.r_[_PRIVATE_USE]
        texts = [avoid, *itertools.chain.from_iterable(_runs(value))]
        is_taken = np.zeros(sys.maxunicode + 1, dtype=bool)
        for text in texts:
            for at in range(0, len(text), _PIECE):
                piece = text[at : at + _PIECE].encode("utf-32-le", "surrogatepass")
                is_taken[np.frombuffer(piece, dtype=np.uint32)] = True
        escaped = {escape for text in texts for escape in _ESCAPES.findall(text)}
        untaken = map(chr, private_use[~is_taken[private_use]])
        free = (character for character in untaken if _escape(character)[:6] not in escaped)
        stand_ins: dict[str, str] = {}

        def stand_in(first: str) -> str:
            if first not in stand_ins:
                chosen = next(free, None)
                if chosen is None:
                    raise InvalidRequestError("messages use every private character of Unicode", param="messages")
                stand_ins[first] = chosen
            return stand_ins[first]

        def replace(run: Run) -> str:
            text, end, pieces = "".join(run), 0, []
            for place in sorted(self._places(run)):
                pieces += [text[end:place], stand_in(text[place])]
                end = place + 1
            return "".join([*pieces, text[end:]])

        disguised: V = _mapped(value, replace)
        return disguised, {chosen: first for first, chosen in stand_ins.items()}

    def _places(self, run: Run) -> set[int]:
        """Returns the positions in `run` of the characters that get a stand-in."""
        if self._spelled is None:
            return set()
        places = {match.start() for match in self._spelled.finditer("".join(run))}
        start = 0
        for text in run:
            stripped = text.rstrip()  # templates may strip it too
            places.update(start + len(stripped) - length for length in self._beginnings.at_end_of(stripped))
            stripped = text.lstrip()
            if self._ends.are_at_start_of(stripped):
                places.add(start + len(text) - len(stripped))
            start += len(text)
        return places


class _Pieces:
    """Beginnings or ends of special tokens.

    Pieces of letters and digits only are left out, because any text may contain them.
    """

    def __init__(self, pieces: Iterable[str]) -> None:
        self._pieces = {piece for piece in pieces if not piece.isalnum()}
        self._lengths = sorted({len(piece) for piece in self._pieces})

    def at_end_of(self, text: str) -> list[int]:
        """Returns the lengths of the pieces that `text` ends with."""
        return [length for length in self._lengths if length <= len(text) and text[-length:] in self._pieces]

    def are_at_start_of(self, text: str) -> bool:
        return any(text[:length] in self._pieces for length in self._lengths)


def unescape(text: str, stand_ins: Collection[str]) -> str:
    """Replaces JSON escapes of `stand_ins` in `text`, which a template may have written."""
    for chosen in stand_ins:
        text = text.replace(_escape(chosen), chosen)
    return text


def _escape(character: str) -> str:
    return json.dumps(character)[1:-1]


def _is_parts(value: object) -> bool:
    """Returns whether `value` is a message's content in parts.

    Templates write the texts of parts one after the other.
    """
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(part, dict) and part.keys() == {"type", "text"} for part in value)
        and all(isinstance(part["text"], str) for part in value)
    )


def _runs(value: object) -> list[Run]:
    """Returns the runs of strings in `value`.

    The texts of a message's parts are one run; every other string is a run of its own.
    """
    if isinstance(value, str):
        return [(value,)]
    if _is_parts(value):
        assert isinstance(value, list)
        return [[part["text"] for part in value]]
    if isinstance(value, Mapping):
        return [*((key,) for key in value), *itertools.chain.from_iterable(map(_runs, value.values()))]
    if isinstance(value, list | tuple):
        return list(itertools.chain.from_iterable(map(_runs, value)))
    return []


def _mapped(value: Any, replace: Callable[[Run], str]) -> Any:
    """Returns `value` with `replace` applied to each of its runs; `replace` must keep the length."""
    if isinstance(value, str):
        return replace((value,))
    if _is_parts(value):
        rest = replace([part["text"] for part in value])
        parts = []
        for part in value:
            length = len(part["text"])
            parts.append(part | {"text": rest[:length]})
            rest = rest[length:]
        return parts
    if isinstance(value, Mapping):
        return {replace((key,)): _mapped(item, replace) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, replace) for item in value]
    return value
