"""The characters of an answer that readers consume, and the parts that they produce."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

T = TypeVar("T")

# A generator that receives pieces of text, then "" at the end of the text, and returns a T.
Reading: TypeAlias = Generator[None, str, T]

WHITE_SPACE = " \t\r\n"


@dataclass(slots=True)
class Said:
    """Part of an answer. A call's `text` is the name of its function; its arguments follow it."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str


class Source:
    """Source of a program's characters, one after the other."""

    def __init__(self) -> None:
        self._piece = ""
        self._position = 0  # position in the piece
        self._has_ended = False
        self._since_mark: list[str] = []

    def read(self) -> Reading[str]:
        """Returns the next character; "" at the end of the text, also if called again."""
        while self._position == len(self._piece):
            if self._has_ended:
                return ""
            self._piece = yield
            self._position = 0
            self._has_ended = not self._piece
        character = self._piece[self._position]
        self._position += 1
        self._since_mark.append(character)
        return character

    def run(self, pattern: re.Pattern[str]) -> str:
        """Reads all arrived characters that match `pattern`, faster than one by one."""
        match = pattern.match(self._piece, self._position)
        if match is None:
            return ""
        self._position = match.end()
        if match[0]:
            self._since_mark.append(match[0])
        return match[0]

    def unread(self, text: str) -> None:
        """Puts back `text`, which must be the last text that was read."""
        self._piece = text + self._piece[self._position :]
        self._position = 0
        kept = "".join(self._since_mark)
        self._since_mark = [kept[: max(0, len(kept) - len(text))]]

    def mark(self) -> None:
        self._since_mark = []

    def since_mark(self) -> str:
        """Returns the text that was read since `mark`."""
        return "".join(self._since_mark)

    def skip(self, characters: str = WHITE_SPACE) -> Reading[str]:
        """Skips `characters`, and returns the next other character; "" at the end of the text."""
        while True:
            character = yield from self.read()
            if not character or character not in characters:
                return character

    def expect(self, text: str) -> Reading[bool]:
        """Reads `text` and returns True if it comes next; otherwise reads nothing."""
        for length, expected in enumerate(text):
            character = yield from self.read()
            if character != expected:
                self.unread(text[:length] + character)
                return False
        return True

    def until(self, markers: Collection[str], take: Callable[[str], None]) -> Reading[str]:
        """Passes the text before the next of `markers` to `take`, as soon as it arrives.

        Text that may be the beginning of a marker is held back. Returns the marker, or "" at the end of the text.
        """
        prose = _without("".join(marker[0] for marker in markers))
        held = ""
        while True:
            if not held and (text := self.run(prose)):
                take(text)
            self._since_mark.clear()  # frees memory: the text may be long, and no reader goes back in it
            character = yield from self.read()
            if not character:
                if held:
                    take(held)
                return ""
            held += character
            while held and not any(marker.startswith(held) for marker in markers):
                take(held[0])
                held = held[1:]
            if held in markers:
                return held


@functools.cache
def _without(characters: str) -> re.Pattern[str]:
    return re.compile(f"[^{re.escape(characters)}]*" if characters else ".*", re.DOTALL)


class Writer:
    """Collects the output of a program.

    White space around calls belongs to the markup: it is content only if content follows.
    """

    def __init__(self, *, include_reasoning: bool = True, parallel_calls: bool = True) -> None:
        self.num_calls = 0
        self._said: list[Said] = []
        self._includes_reasoning = include_reasoning
        self._max_calls = None if parallel_calls else 1
        self._drops_call = False
        self._held_content = ""
        self._held_reasoning = ""
        self._reasoning: list[str] = []

    def content(self, text: str) -> None:
        kept = text.rstrip()
        if kept:
            self._say("content", self._held_content + kept)
            self._held_content = ""
        self._held_content += text[len(kept) :]

    def reasoning(self, text: str) -> None:
        """Adds reasoning, without the newlines at its end, which come from templates."""
        kept = text.rstrip("\n")
        if kept:
            self._reasoning.append(self._held_reasoning + kept)
            if self._includes_reasoning:
                self._say("reasoning", self._reasoning[-1])
            self._held_reasoning = ""
        self._held_reasoning += text[len(kept) :]

    def begin_call(self, name: str) -> None:
        self._held_content = ""
        self._drops_call = self.num_calls == self._max_calls
        if not self._drops_call:
            self.num_calls += 1
            self._say("call", name)

    def arguments(self, text: str) -> None:
        if not self._drops_call:
            self._say("arguments", text)

    @property
    def held_content(self) -> str:
        """White space that is content unless a call follows."""
        return self._held_content

    @property
    def reasoning_text(self) -> str:
        """All reasoning so far, also if the output does not include it."""
        return "".join(self._reasoning)

    def end(self) -> None:
        """Writes white space that was held back, unless the answer has a tool call. Must be the last method called."""
        if self._held_content and not self.num_calls:
            self._say("content", self._held_content)
        self._held_content = ""

    def take(self) -> list[Said]:
        """Returns the parts written since the last call."""
        said, self._said = self._said, []
        return said

    def _say(self, kind: Literal["content", "reasoning", "call", "arguments"], text: str) -> None:
        last = self._said[-1] if self._said else None
        if last is not None and last.kind == kind and kind != "call":
            last.text += text
        else:
            self._said.append(Said(kind, text))
