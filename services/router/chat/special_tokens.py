"""Keeps a client's text as text, even if it spells one of the model's special tokens.

Only the chat template writes special tokens. A user who could write `<|im_end|>` would end the message, and with
`<|im_start|>system` begin one of the operator's. So before a template is rendered, a stand-in replaces the first
character of every special token that a client spelled. The tokenizer turns it back once it has found the special
tokens that are left. A stand-in is one character, so a template may cut, measure or escape its input.

A token may also be spelled across a border: by two strings that a template writes one after the other, or by one and
the template's own text. So where a string ends with a token's beginning, or begins with one's end, that gets a stand-in
too.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from cluster.errors import InvalidRequestError

V = TypeVar("V")

Run = Sequence[str]
"""Strings that a template may write one after the other."""

# Meaningless characters, those with the shortest JSON escapes first.
_PRIVATE_USE = (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE))


class SpecialTokenGuard:
    def __init__(self, special_tokens: Collection[str]) -> None:
        # The first character, by which text is searched quickly, and a look-ahead, so that spellings that overlap are
        # all found.
        alternatives = "|".join(
            re.escape(first) + f"(?={'|'.join(re.escape(token[1:]) for token in sorted(tokens))})"
            for first, tokens in itertools.groupby(sorted(filter(None, special_tokens)), key=lambda token: token[0])
        )
        self._spelled = re.compile(alternatives) if alternatives else None
        cuts = [(token[:cut], token[cut:]) for token in special_tokens for cut in range(1, len(token))]
        self._beginnings = _Pieces(before for before, _ in cuts)
        self._ends = _Pieces(after for _, after in cuts)

    def disguise(self, value: V, *, avoid: str) -> tuple[V, dict[str, str]]:
        """Returns `value` (as JSON has it) with stand-ins, and the character that each of them stands for.

        If no special token is spelled, returns `value` itself and no stand-ins. No stand-in is in `avoid`, the rest of
        the text that will be rendered.
        """
        if not any(map(self._places, _runs(value))):
            return value, {}
        taken = "".join([avoid, *itertools.chain.from_iterable(_runs(value))])
        free = (
            character
            for character in map(chr, _PRIVATE_USE)
            if character not in taken and _escape(character) not in taken
        )
        stand_ins: dict[str, str] = {}

        def stand_in(first: str) -> str:
            if first not in stand_ins:
                chosen = next(free, None)
                if chosen is None:
                    raise InvalidRequestError("messages use every private character of Unicode", param="messages")
                stand_ins[first] = chosen
            return stand_ins[first]

        def replace(run: Run) -> str:
            characters = list("".join(run))
            for place in self._places(run):
                characters[place] = stand_in(characters[place])
            return "".join(characters)

        disguised: V = _mapped(value, replace)
        return disguised, {chosen: first for first, chosen in stand_ins.items()}

    def _places(self, run: Run) -> set[int]:
        """Returns the positions in `run` of the characters that get a stand-in."""
        if self._spelled is None:
            return set()
        places = {match.start() for match in self._spelled.finditer("".join(run))}
        start = 0
        for text in run:
            stripped = text.rstrip()  # templates may do the same
            places.update(start + len(stripped) - length for length in self._beginnings.at_end_of(stripped))
            stripped = text.lstrip()
            if self._ends.are_at_start_of(stripped):
                places.add(start + len(text) - len(stripped))
            start += len(text)
        return places


class _Pieces:
    """Beginnings or ends of special tokens. Letters and digits alone are left out: any text may contain them."""

    def __init__(self, pieces: Iterable[str]) -> None:
        self._pieces = {piece for piece in pieces if not piece.isalnum()}
        self._lengths = sorted({len(piece) for piece in self._pieces})

    def at_end_of(self, text: str) -> list[int]:
        """Returns the lengths of those that `text` ends with."""
        return [length for length in self._lengths if length <= len(text) and text[-length:] in self._pieces]

    def are_at_start_of(self, text: str) -> bool:
        return any(text[:length] in self._pieces for length in self._lengths)


def unescape(text: str, stand_ins: Collection[str]) -> str:
    """`text` with the stand-ins that a template wrote as JSON escapes them."""
    for chosen in stand_ins:
        text = text.replace(_escape(chosen), chosen)
    return text


def _escape(character: str) -> str:
    return json.dumps(character)[1:-1]


def _is_parts(value: object) -> bool:
    """Returns True if `value` is a message's content in parts, which templates write one after the other."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(part, dict) and part.keys() == {"type", "text"} for part in value)
        and all(isinstance(part["text"], str) for part in value)
    )


def _runs(value: object) -> list[Run]:
    """All strings in `value`, one by one except for the texts of parts."""
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
    """Returns `value` with `replace` applied to all strings of `_runs`; `replace` keeps the length of a run."""
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
