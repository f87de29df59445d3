"""Pieces of the choices of an answer, between the target's tokens and the API's objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.logprobs import TokenLogprobs, joined
from services.router.output.accepted_drafts import AnswerRound
from services.router.output.source import Said
from services.router.output.speculation_stats import SpeculationStats


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a choice, for an answer that reports it."""

    token_ids: Sequence[int]
    logprobs: TokenLogprobs | None  # from the second token on


@dataclass(slots=True)  # not frozen: one is made per chunk, and freezing doubles the time
class Piece:
    """A part of one choice, or all of it. `text` may be empty: tokens can end inside a character."""

    text: str  # text of a completion, or of a chat whose answers are all content
    token_ids: Sequence[int]
    finish_reason: str | None  # "stop" or "length" on the last piece
    speculation: SpeculationStats | None = None  # statistics of the whole choice, on the last piece
    stop_reason: int | str | None = None  # on the last piece: the requested stop token or string that ended it
    logprobs: TokenLogprobs | None = None  # of `token_ids`, if requested
    prompt: Prompt | None = None  # on the first piece with tokens, if requested
    rounds: Sequence[AnswerRound] = ()  # rounds of `token_ids`, if requested
    num_cached_tokens: int = 0  # prompt tokens found in the target's prefix cache; on the first piece with tokens
    said: Sequence[Said] = ()  # replaces `text` in a chat whose answers have reasoning or calls
    num_reasoning_tokens: int = 0  # reasoning tokens of the whole choice, on the last piece


def merged(pieces: Sequence[Piece]) -> Piece:
    """Returns all `pieces` of a choice as one piece."""
    logprobs = pieces[0].logprobs
    for piece in pieces[1:]:
        logprobs = joined(logprobs, piece.logprobs)
    return Piece(
        text="".join(piece.text for piece in pieces),
        token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
        finish_reason=pieces[-1].finish_reason,
        speculation=pieces[-1].speculation,
        stop_reason=pieces[-1].stop_reason,
        logprobs=logprobs,
        prompt=next((piece.prompt for piece in pieces if piece.prompt is not None), None),
        rounds=[answer_round for piece in pieces for answer_round in piece.rounds],
        num_cached_tokens=sum(piece.num_cached_tokens for piece in pieces),
        said=[said for piece in pieces for said in piece.said],
        num_reasoning_tokens=pieces[-1].num_reasoning_tokens,
    )
