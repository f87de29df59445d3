"""Reads an answer's text as a message, and writes it in OpenAI's form.

A message has content, reasoning and calls. It is written whole or in deltas.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.router.output.formats import Program, ToolFormat, plain
from services.router.output.reasoning import read_reasoning
from services.router.output.source import Reading, Said, Source, Writer
from services.router.output.tools import Tool

_ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Reader:
    """Settings for reading the answers to one request."""

    program: Program = plain
    tools: Sequence[Tool] = ()
    reads_reasoning: bool = False
    reasoning_has_begun: bool = False  # whether the prompt began the reasoning
    may_reason: bool = False  # whether the answer may begin with reasoning: the prompt has not ended it
    include_reasoning: bool = True
    call_format: ToolFormat | None = None  # of calls that the model may make or not
    parallel_calls: bool = True
    has_short_ids: bool = False
    calls_finish: bool = True  # whether an answer with calls ends with "tool_calls": not if the client chose the call

    @property
    def reads_calls(self) -> bool:
        """True if answers may contain tool calls."""
        return self.program is not plain

    def start(self) -> MessageReader:
        return MessageReader(self)

    def read(self, source: Source, writer: Writer) -> Reading[None]:
        if self.reads_reasoning:
            yield from read_reasoning(source, writer, has_begun=self.reasoning_has_begun)
        yield from self.program(source, writer, self.tools)


class MessageReader:
    """Reads one answer; the result does not depend on how the text is split."""

    def __init__(self, reader: Reader) -> None:
        self._writer = Writer(include_reasoning=reader.include_reasoning, parallel_calls=reader.parallel_calls)
        self._program = reader.read(Source(), self._writer)
        next(self._program)

    @property
    def held_content(self) -> str:
        """White space that is content unless a call follows."""
        return self._writer.held_content

    @property
    def reasoning_text(self) -> str:
        """All reasoning so far, returned to the client or not."""
        return self._writer.reasoning_text

    def push(self, text: str, *, is_last: bool) -> list[Said]:
        """Reads `text`, and returns the parts of the answer that are certain now."""
        if text:
            self._program.send(text)
        if is_last:
            try:
                self._program.send("")
            except StopIteration:
                self._writer.end()
            else:
                raise AssertionError("a program continues to read after the end")
        return self._writer.take()


class MessageWriter:
    """Writes one answer in OpenAI's form, whole or in deltas."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._num_calls = 0

    def new_call_id(self) -> str:
        if self._reader.has_short_ids:
            return "".join(secrets.choice(_ALPHABET) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    def finish_reason(self, reason: str | None) -> str | None:
        """Returns the message's finish reason; `reason`: finish reason of the text.

        It is "tool_calls" instead of "stop" if the message has calls and `calls_finish` is set.
        """
        return "tool_calls" if reason == "stop" and self._num_calls and self._reader.calls_finish else reason

    def deltas(self, said: Sequence[Said]) -> list[dict[str, Any]]:
        """Returns `said` as the deltas of a streamed message."""
        return [self._delta(one) for one in said]

    def message(self, said: Sequence[Said]) -> dict[str, Any]:
        """Returns the message of an answer with all of `said`."""
        content, reasoning = "", ""
        calls: list[dict[str, Any]] = []
        for one in said:
            if one.kind == "content":
                content += one.text
            elif one.kind == "reasoning":
                reasoning += one.text
            elif one.kind == "call":
                calls.append(self._call(one.text))
                self._num_calls += 1
            else:
                calls[-1]["function"]["arguments"] += one.text
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if not content and (calls or reasoning) else content,
            "refusal": None,
        }
        if reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if calls:
            message["tool_calls"] = calls
        return message

    def _delta(self, said: Said) -> dict[str, Any]:
        match said.kind:
            case "content":
                return {"content": said.text}
            case "reasoning":
                return {"reasoning_content": said.text, "reasoning": said.text}
            case "call":
                self._num_calls += 1
                return {"tool_calls": [{"index": self._num_calls - 1} | self._call(said.text)]}
        return {"tool_calls": [{"index": self._num_calls - 1, "function": {"arguments": said.text}}]}

    def _call(self, name: str) -> dict[str, Any]:
        return {"id": self.new_call_id(), "type": "function", "function": {"name": name, "arguments": ""}}
