"""What the answers of both endpoints have in common: pieces of text, usage, and the frame of every JSON object."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from services.router.speculation_stats import SpeculationStats


@dataclass(slots=True)  # not frozen: made for every chunk, that takes twice the time
class Piece:
    """A part of one choice, or all of it. `text` may be empty: tokens can end inside a character."""

    text: str
    token_ids: Sequence[int]
    finish_reason: str | None  # "stop" or "length" on the last piece
    speculation: SpeculationStats | None = None  # of the whole choice, on the last piece


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int

    def to_json(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


@dataclass(frozen=True)
class Reply(abc.ABC):
    """What every object of one answer has in common."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    id: str
    created: int
    model: str
    seed: int
    has_token_ids: bool = False  # choices carry the token IDs of their text
    has_speculation_stats: bool = False  # choices say, at their end, what speculation did
    include_usage: bool = False  # the usage of a streamed answer comes at its end and is null until then
    continuous_usage: bool = False  # but for this: that of its choice so far is in every chunk

    def whole(self, choices: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        objects = [self._choice(index, choice) for index, choice in enumerate(choices)]
        speculation = choices[0].speculation if len(choices) == 1 else None
        return self._frame(self.whole_object, objects) | {"usage": usage.to_json()} | _metrics(speculation)

    def chunks(self, index: int, piece: Piece, usage: Usage | None, *, is_first: bool) -> Iterator[dict[str, Any]]:
        """What a streamed answer has to say of a piece of the choice `index`: nothing, or one object or more.

        `usage` is that of the choice with the piece, where it is to be in every chunk (`continuous_usage`).
        """
        for choice in self._deltas(index, piece, is_first=is_first):
            chunk = self._frame(self.chunk_object, [choice])
            if self.include_usage:
                chunk["usage"] = None if usage is None else usage.to_json()
            yield chunk

    def usage_chunk(self, usage: Usage, speculation: SpeculationStats | None) -> dict[str, Any]:
        """The last object of a streamed answer whose usage was asked for; `speculation` of its only choice, if it has
        one."""
        return self._frame(self.chunk_object, []) | {"usage": usage.to_json()} | _metrics(speculation)

    @abc.abstractmethod
    def _choice(self, index: int, choice: Piece) -> dict[str, Any]: ...

    @abc.abstractmethod
    def _deltas(self, index: int, piece: Piece, *, is_first: bool) -> Iterator[dict[str, Any]]: ...

    def _with_extras(
        self, choice: dict[str, Any], token_ids: Sequence[int], speculation: SpeculationStats | None
    ) -> dict[str, Any]:
        """`choice` with what the client asked for beyond OpenAI's fields."""
        if self.has_token_ids:
            choice["token_ids"] = list(token_ids)
        if self.has_speculation_stats and speculation is not None:
            choice["speculation"] = speculation.to_json()
        return choice

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "seed": self.seed,
        }


def _metrics(speculation: SpeculationStats | None) -> dict[str, Any]:
    """vLLM's field of that name, which its load generators read: of an answer of one choice that had drafts."""
    if speculation is None or not speculation.num_drafts:
        return {}
    return {"metrics": {"speculative_decoding": speculation.to_vllm()}}
