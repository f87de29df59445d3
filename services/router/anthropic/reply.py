"""The reply to a request for a message: the message, or its stream of events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.errors import OutriderError
from services.router.anthropic.content import ContentBlocks, Event
from services.router.anthropic_errors import anthropic_envelope
from services.router.api.reply import Reply, Usage
from services.router.errors import bounded_message
from services.router.http.streaming import named_event
from services.router.output.message import MessageWriter, Reader
from services.router.output.piece import Piece
from services.router.output.speculation_stats import SpeculationStats


@dataclass
class _Progress:
    """The answer so far."""

    writer: MessageWriter
    content: ContentBlocks = field(default_factory=ContentBlocks)
    stop_reason: str | None = None
    stop_sequence: str | None = None


@dataclass(frozen=True, kw_only=True)
class MessagesReply(Reply):
    id_prefix = "msg_"

    reader: Reader
    progress: _Progress = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "progress", _Progress(MessageWriter(self.reader)))

    def whole(self, choices: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        (choice,) = choices
        for _ in self._said(choice):
            pass
        return self._message(usage)

    def chunks(self, index: int, piece: Piece, usage: Usage | None, *, is_first: bool) -> Iterator[dict[str, Any]]:
        if is_first:
            assert usage is not None
            of_prompt = replace(usage, completion_tokens=0)
            yield {"type": "message_start", "message": self._message(of_prompt) | {"content": []}}
            yield {"type": "ping"}
        yield from self._said(piece)

    def event(self, value: Mapping[str, Any]) -> bytes:
        return named_event(value["type"], value)

    def ending(self, usage: Usage, speculation: SpeculationStats | None) -> Iterator[bytes]:
        delta = {"stop_reason": self.progress.stop_reason, "stop_sequence": self.progress.stop_sequence}
        yield self.event({"type": "message_delta", "delta": delta, "usage": _usage(usage)})
        yield self.event({"type": "message_stop"})

    def failure(self, error: OutriderError) -> bytes:
        return self.event(anthropic_envelope(error, bounded_message(error)))

    def _said(self, piece: Piece) -> Iterator[Event]:
        progress = self.progress
        yield from progress.content.say(piece.said, iter(progress.writer.new_call_id, None))
        if piece.finish_reason is not None:
            yield from progress.content.close()
            progress.stop_reason, progress.stop_sequence = self._stop_reason(piece)

    def _stop_reason(self, last: Piece) -> tuple[str, str | None]:
        """Returns why the answer ends with `last`, and the stop sequence if one ended it."""
        if last.finish_reason == "length":
            return "max_tokens", None
        if isinstance(last.stop_reason, str):
            return "stop_sequence", last.stop_reason
        return ("tool_use" if self.progress.content.has_calls else "end_turn"), None

    def _message(self, usage: Usage) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": self.progress.content.blocks,
            "stop_reason": self.progress.stop_reason,
            "stop_sequence": self.progress.stop_sequence,
            "usage": _usage(usage),
            "seed": self.seed,
            "system_fingerprint": self.system_fingerprint,
        }


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
