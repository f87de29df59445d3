"""Reasoning that models write before they answer, between `<think>` and `</think>`."""

from __future__ import annotations

from services.router.output.source import WHITE_SPACE, Reading, Source, Writer

BEGIN, END = "<think>", "</think>"


def read_reasoning(source: Source, writer: Writer, *, has_begun: bool) -> Reading[None]:
    """Reads the reasoning at the start of an answer, if there is any.

    `has_begun`: whether the prompt has opened it, as the templates of models that always reason do.
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
