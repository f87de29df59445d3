"""Groups the tokens of an answer by round, with the accepted drafts (`return_rounds`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.wire.replies import RoundCounts


@dataclass(frozen=True, slots=True)
class AnswerRound:
    """The tokens that one step added to a choice.

    Accepted drafts come first, then the target's own token, unless the choice ended before it. A step without
    speculation has no drafts.
    """

    num_draft_tokens: int
    num_accepted_tokens: int
    texts: Sequence[str]  # text that each token added; "": the token ended inside a character

    def to_json(self) -> dict[str, Any]:
        return {
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "tokens": self.texts,
        }


def answer_rounds(texts: Sequence[str], rounds: Sequence[RoundCounts]) -> Iterator[AnswerRound]:
    """Yields the tokens of a reply, grouped by the step that added them.

    `texts` has the text of each token. There are fewer than the `rounds` had if a stop string ended the choice.
    """
    end = 0
    for counts in rounds:
        yield from _plain(texts[end : counts.start])
        end = counts.start + counts.num_accepted_tokens + 1
        own = texts[counts.start : end]
        if own:
            yield AnswerRound(counts.num_draft_tokens, min(counts.num_accepted_tokens, len(own)), own)
    yield from _plain(texts[end:])


def _plain(texts: Sequence[str]) -> Iterator[AnswerRound]:
    for text in texts:
        yield AnswerRound(0, 0, (text,))
