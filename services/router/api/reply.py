"""Base of the replies of all APIs: usage, and the common fields of every JSON object."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from cluster.errors import OutriderError
from services.router.errors import envelope
from services.router.http.streaming import DONE, event
from services.router.output.accepted_drafts import AnswerRound
from services.router.output.logprobs import LogprobsFormat
from services.router.output.piece import Piece
from services.router.output.speculation_stats import SpeculationStats


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # prompt tokens found in the targets' prefix caches
    reasoning_tokens: int  # tokens of the reasoning's text

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


@dataclass(frozen=True)
class Reply(abc.ABC):
    """Writes one answer, as a body or as the events of a stream, in the form of one API."""

    id_prefix: ClassVar[str]
    request_type: ClassVar[str] = "other"  # value of vLLM's metric label `request_type`

    id: str
    created: int
    model: str
    seed: int
    system_fingerprint: str  # fingerprint of the targets: model, weights, engine and numerics
    has_token_ids: bool = False  # whether choices have the token IDs of their text
    has_rounds: bool = False  # whether choices have the round of each token
    has_speculation_stats: bool = False  # whether choices end with statistics of speculation
    include_usage: bool = False  # a stream reports its usage at its end; until then it is null
    continuous_usage: bool = False  # if true, every chunk reports the usage of its choice so far
    logprobs: LogprobsFormat | None = None  # whether choices have the log-probabilities of their tokens
    has_echo: bool = False  # whether the text and tokens of a choice begin with those of its prompt
    num_logprobs: int = 0
    num_prompt_logprobs: int | None = None  # reported separately, as by vLLM

    @abc.abstractmethod
    def whole(self, choices: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        """Returns the body of an answer that is not streamed."""

    @abc.abstractmethod
    def chunks(self, index: int, piece: Piece, usage: Usage | None, *, is_first: bool) -> Iterator[dict[str, Any]]:
        """Yields the JSON objects of a streamed answer for `piece` of choice `index`, if any.

        `usage`: usage of the choice so far, including `piece`; None unless `continuous_usage` is set.
        """

    @abc.abstractmethod
    def event(self, value: Mapping[str, Any]) -> bytes:
        """Returns `value`, one of `chunks`, as a server-sent event."""

    @abc.abstractmethod
    def ending(self, usage: Usage, speculation: SpeculationStats | None) -> Iterator[bytes]:
        """Yields the events that end a streamed answer.

        `speculation`: statistics of its only choice; None if it has several.
        """

    @abc.abstractmethod
    def failure(self, error: OutriderError) -> bytes:
        """Returns the event that ends a streamed answer with `error`."""


@dataclass(frozen=True)
class ChoicesReply(Reply):
    """Writes an answer as OpenAI's list of choices."""

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def whole(self, choices: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        objects = [self._choice(index, choice) for index, choice in enumerate(choices)]
        speculation = choices[0].speculation if len(choices) == 1 else None
        frame = self._frame(self.whole_object, objects) | self._of_prompts(choices)
        return frame | {"usage": usage.to_json()} | _metrics(speculation)

    def _of_prompts(self, choices: Sequence[Piece]) -> dict[str, Any]:
        """Returns the fields that describe the prompts, next to `choices`."""
        return {}

    def chunks(self, index: int, piece: Piece, usage: Usage | None, *, is_first: bool) -> Iterator[dict[str, Any]]:
        for choice in self._deltas(index, piece, is_first=is_first):
            chunk = self._frame(self.chunk_object, [choice])
            if self.include_usage:
                chunk["usage"] = None if usage is None else usage.to_json()
            yield chunk

    def event(self, value: Mapping[str, Any]) -> bytes:
        return event(value)

    def ending(self, usage: Usage, speculation: SpeculationStats | None) -> Iterator[bytes]:
        if self.include_usage:
            yield event(self.usage_chunk(usage, speculation))
        yield DONE

    def failure(self, error: OutriderError) -> bytes:
        return event(envelope(error))

    def usage_chunk(self, usage: Usage, speculation: SpeculationStats | None) -> dict[str, Any]:
        """Returns the last object of a streamed answer that reports its usage.

        `speculation`: statistics of its only choice; None if it has several.
        """
        return self._frame(self.chunk_object, []) | {"usage": usage.to_json()} | _metrics(speculation)

    @abc.abstractmethod
    def _choice(self, index: int, choice: Piece) -> dict[str, Any]: ...

    @abc.abstractmethod
    def _deltas(self, index: int, piece: Piece, *, is_first: bool) -> Iterator[dict[str, Any]]: ...

    def _prompt_logprobs(self, choice: Piece) -> list[dict[str, Any] | None] | None:
        """Returns the log-probabilities of the prompt of `choice` in vLLM's form; None if not requested."""
        prompt = choice.prompt
        if self.num_prompt_logprobs is None or self.logprobs is None or prompt is None or prompt.logprobs is None:
            return None
        scores = prompt.logprobs.part(0, len(prompt.logprobs), self.num_prompt_logprobs)
        return self.logprobs.prompt(prompt.token_ids, scores)

    def _stop(self, choice: Piece) -> dict[str, Any]:
        """Returns vLLM's field `stop_reason`, if a requested stop token or string ended the choice."""
        return {} if choice.stop_reason is None else {"stop_reason": choice.stop_reason}

    def _with_extras(
        self,
        choice: dict[str, Any],
        token_ids: Sequence[int],
        speculation: SpeculationStats | None,
        rounds: Sequence[AnswerRound],
    ) -> dict[str, Any]:
        """Returns `choice` with the requested fields beyond OpenAI's."""
        if self.has_token_ids:
            choice["token_ids"] = list(token_ids)
        if self.has_rounds:
            choice["rounds"] = [answer_round.to_json() for answer_round in rounds]
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
            "system_fingerprint": self.system_fingerprint,
        }


def _metrics(speculation: SpeculationStats | None) -> dict[str, Any]:
    """Returns vLLM's field `metrics`, which its load generators read.

    Returns no field if there are no statistics, or if no round had drafts.
    """
    if speculation is None or not speculation.num_drafts:
        return {}
    return {"metrics": {"speculative_decoding": speculation.to_vllm()}}
