"""Colours tokens by their origin: accepted drafts, corrections, bonus tokens, plain decodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from services.terminal import as_text

Kind = Literal["accepted", "correction", "bonus", "plain"]

# Not by colour alone: a correction is underlined, a bonus token bold.
_STYLES: dict[Kind, str] = {"accepted": "\x1b[32m", "correction": "\x1b[33;4m", "bonus": "\x1b[36;1m", "plain": ""}
_RESET = "\x1b[0m"
_MEANINGS: dict[Kind, str] = {
    "accepted": "accepted drafts",
    "correction": "corrections",
    "bonus": "bonus tokens",
    "plain": "decoded plainly",
}


def kinds_of(step: Mapping[str, Any]) -> Iterator[tuple[str, Kind]]:
    """Yields the text and the origin of each token that a step of the target added."""
    num_drafted, num_accepted = step["num_draft_tokens"], step["num_accepted_tokens"]
    own: Kind = "plain" if not num_drafted else "bonus" if num_accepted == num_drafted else "correction"
    for place, text in enumerate(step["tokens"]):
        yield text, "accepted" if place < num_accepted else own


@dataclass(slots=True)
class Painter:
    """Paints an answer, and counts its tokens."""

    has_colours: bool
    counts: Counter[Kind] = field(default_factory=Counter)
    num_steps: int = 0

    def paint(self, steps: Iterable[Mapping[str, Any]]) -> str:
        """Paints the text that `steps`, the `rounds` of a chunk, added."""
        painted = []
        for step in steps:
            self.num_steps += 1
            for text, kind in kinds_of(step):
                self.counts[kind] += 1
                painted.append(self._in_style(as_text(text), kind))
        return "".join(painted)

    def summary(self, seconds: float) -> str:
        """Returns a summary of all painted text, which took `seconds`."""
        num_tokens = sum(self.counts.values())
        parts = [f"{number} {_MEANINGS[kind]}" for kind in _STYLES if (number := self.counts[kind])]
        rate = num_tokens / seconds if seconds > 0 else 0.0
        length = num_tokens / self.num_steps if self.num_steps else 0.0
        return (
            f"{num_tokens} tokens in {seconds:.1f} s ({rate:.0f}/s), {length:.2f} a step: {', '.join(parts) or 'none'}"
        )

    def legend(self) -> str:
        return ", ".join(self._in_style(_MEANINGS[kind], kind) for kind in _STYLES)

    def _in_style(self, text: str, kind: Kind) -> str:
        style = _STYLES[kind]
        return f"{style}{text}{_RESET}" if self.has_colours and style and text else text
