"""Reasoning that models write before they answer, between `<think>` and `</think>`."""

from __future__ import annotations

from services.router.output.source import WHITE_SPACE, Reading, Source, Writer

BEGIN, END = "<think>", "</think>"


def read_reasoning(source: Source, writer: Writer, *, has_begun: bool) -> Reading[None]:
    """Reads as far as the end of the reasoning, if there is any: only at the start of an answer.

    `has_begun`: the prompt ends within it, as templates of models that always reason see to.
    """
    if not has_begun:
        source.mark()
        character = yield from source.skip(WHITE_SPACE)
        source.unread(character)
        if not (yield from source.expect(BEGIN)):
            source.unread(source.since_mark())
            return
    source.unread((yield from source.skip("\n")))
    if (yield from source.until((END,), writer.reasoning)):
        source.unread((yield from source.skip("\n")))
