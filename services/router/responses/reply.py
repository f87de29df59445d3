"""Writes a response as one object, or as a stream of events."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.errors import OutriderError
from services.router.api.reply import Reply, Usage
from services.router.errors import envelope
from services.router.http.streaming import named_event
from services.router.output.message import MessageWriter, Reader
from services.router.output.piece import Piece
from services.router.output.speculation_stats import SpeculationStats
from services.router.responses.output import Event, OutputItems
from services.router.responses.request import ResponsesChat


@dataclass
class _Progress:
    """The state of the only choice of a response."""

    writer: MessageWriter
    output: OutputItems
    has_begun: bool = False  # whether its first events were made
    finish_reason: str | None = None
    numbers: Iterator[int] = field(default_factory=itertools.count)  # sequence numbers of events


@dataclass(frozen=True, kw_only=True)
class ResponsesReply(Reply):
    id_prefix = "resp_"
    request_type = "responses"

    request: ResponsesChat
    reader: Reader
    progress: _Progress = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "progress", _Progress(MessageWriter(self.reader), OutputItems(self.request.origins_of_calls))
        )

    def whole(self, choices: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        (choice,) = choices
        for _ in self._said(choice):
            pass
        return self._response(usage)

    def chunks(self, index: int, piece: Piece, usage: Usage | None, *, is_first: bool) -> Iterator[dict[str, Any]]:
        if is_first:
            yield from self._beginning()
        yield from self._said(piece)

    def event(self, value: Mapping[str, Any]) -> bytes:
        return named_event(value["type"], {**value, "sequence_number": next(self.progress.numbers)})

    def ending(self, usage: Usage, speculation: SpeculationStats | None) -> Iterator[bytes]:
        response = self._response(usage)
        yield self.event({"type": f"response.{response['status']}", "response": response})

    def failure(self, error: OutriderError) -> bytes:
        reported = envelope(error)["error"]
        response = self._response(None) | {
            "status": "failed",
            "error": {"code": "server_error", "message": reported["message"]},
        }
        # If only comments were sent, clients still expect a response to begin before it fails.
        events = [] if self.progress.has_begun else list(self._beginning())
        return b"".join(map(self.event, [*events, {"type": "response.failed", "response": response}]))

    def _beginning(self) -> Iterator[Event]:
        self.progress.has_begun = True
        yield {"type": "response.created", "response": self._response(None)}
        yield {"type": "response.in_progress", "response": self._response(None)}

    def _said(self, piece: Piece) -> Iterator[Event]:
        progress = self.progress
        yield from progress.output.say(piece.said, iter(progress.writer.new_call_id, None))
        if piece.finish_reason is not None:
            progress.finish_reason = piece.finish_reason
            yield from progress.output.close("incomplete" if piece.finish_reason == "length" else "completed")

    def _response(self, usage: Usage | None) -> dict[str, Any]:
        request, origin, progress = self.request, self.request.origin, self.progress
        is_cut_off = progress.finish_reason == "length"
        has_ended = progress.finish_reason is not None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if has_ended else None,
            "system_fingerprint": self.system_fingerprint,
            "status": ("incomplete" if is_cut_off else "completed") if has_ended else "in_progress",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut_off else None,
            "instructions": origin.instructions,
            "max_output_tokens": origin.max_output_tokens,
            "metadata": origin.metadata,
            "model": self.model,
            "output": list(progress.output.items),
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": origin.reasoning.get("effort"), "summary": None},
            "seed": self.seed,
            "store": False,
            "temperature": request.temperature,
            "text": {"format": origin.text.get("format") or {"type": "text"}},
            "tool_choice": origin.tool_choice,
            "tools": origin.tools,
            "top_p": request.top_p,
            "truncation": origin.truncation,
            "usage": None if usage is None else self._usage(usage),
        }

    def _usage(self, usage: Usage) -> dict[str, Any]:
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
