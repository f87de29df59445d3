"""Converts a target's replies to many calls to and from the columns of `GenerateReplies`. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.errors import OutriderError, from_status
from cluster.logprobs import TokenLogprobs, joined
from cluster.wire.columns import split
from protos.speculation.v1 import target_pb2

EPOCH_KEY = "outrider-epoch"  # key in a stream's initial metadata: the epoch of its worker
UNFINISHED = target_pb2.FINISH_REASON_UNSPECIFIED


class RoundCounts(NamedTuple):
    """Outcome of one round that verified at least one draft token.

    The tokens of the round are the accepted drafts, followed by the target's own token unless the sequence ended
    before.
    """

    num_draft_tokens: int
    num_accepted_tokens: int
    start: int = 0  # index of the round's first token in the reply; tokens outside of rounds were decoded plainly


@dataclass(slots=True)
class CallReply:
    """The tokens committed for one call since its last reply, by one step or by several."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: target_pb2.FinishReason.ValueType = UNFINISHED
    rounds: Sequence[RoundCounts] = ()
    error: OutriderError | None = None  # set: the call ends with this error, after these tokens
    logprobs: TokenLogprobs | None = None  # log-probabilities of `token_ids`, if requested
    prompt_logprobs: TokenLogprobs | None = None  # those of the next prompt tokens, beginning with the second token
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache; only in the first reply with tokens

    def merge(self, newer: CallReply) -> None:
        """Appends the reply that follows this one."""
        if newer.rounds:
            start = len(self.token_ids)
            later = [counts._replace(start=start + counts.start) for counts in newer.rounds]
            self.rounds = [*self.rounds, *later]
        self.token_ids += newer.token_ids
        self.finish_reason = newer.finish_reason
        self.error = newer.error
        self.logprobs = joined(self.logprobs, newer.logprobs)
        self.prompt_logprobs = joined(self.prompt_logprobs, newer.prompt_logprobs)
        self.num_cached_tokens += newer.num_cached_tokens


def encode_replies(replies: Mapping[int, CallReply]) -> target_pb2.GenerateReplies:
    """Encodes `replies`, a mapping from call number to reply."""
    message = target_pb2.GenerateReplies(
        calls=replies,
        num_tokens=[len(reply.token_ids) for reply in replies.values()],
        token_ids=[token for reply in replies.values() for token in reply.token_ids],
    )
    for call, reply in replies.items():
        if reply.logprobs is not None:
            message.logprobs.append(_encode_logprobs(call, reply.logprobs))
        if reply.prompt_logprobs is not None:
            message.prompt_logprobs.append(_encode_logprobs(call, reply.prompt_logprobs))
        if reply.num_cached_tokens:
            message.cached_calls.append(call)
            message.num_cached_tokens.append(reply.num_cached_tokens)
        if reply.finish_reason != UNFINISHED:
            message.finished.append(call)
            message.finish_reasons.append(reply.finish_reason)
        elif reply.error is not None:
            message.errors.append(_encode_error(call, reply.error))
    if any(reply.rounds for reply in replies.values()):
        message.num_rounds.extend([len(reply.rounds) for reply in replies.values()])
        rounds = [counts for reply in replies.values() for counts in reply.rounds]
        message.num_draft_tokens.extend([counts.num_draft_tokens for counts in rounds])
        message.num_accepted_tokens.extend([counts.num_accepted_tokens for counts in rounds])
        if any(not _follow_one_another(reply.rounds) for reply in replies.values()):
            message.round_starts.extend([counts.start for counts in rounds])
    return message


def decode_replies(message: target_pb2.GenerateReplies) -> dict[int, CallReply]:
    """Returns the replies by call number. Raises ValueError if the columns of the message do not match."""
    columns = split(message.token_ids[:], message.num_tokens)
    replies = {call: CallReply(list(token_ids)) for call, token_ids in zip(message.calls, columns, strict=True)}
    if message.num_rounds:
        counts = list(zip(message.num_draft_tokens, message.num_accepted_tokens, strict=True))
        starts = message.round_starts or _starts(counts, message.num_rounds)
        rounds = [RoundCounts(*each, start) for each, start in zip(counts, starts, strict=True)]
        for reply, own in zip(replies.values(), split(rounds, message.num_rounds), strict=True):
            reply.rounds = own
    for call, reason in zip(message.finished, message.finish_reasons, strict=True):
        _of(call, replies).finish_reason = reason
    for call, num_cached_tokens in zip(message.cached_calls, message.num_cached_tokens, strict=True):
        _of(call, replies).num_cached_tokens = num_cached_tokens
    for error in message.errors:
        _of(error.call, replies).error = from_status(error.code, error.message, error.param or None)
    for scores in message.logprobs:
        reply = _of(scores.call, replies)
        reply.logprobs = _decode_logprobs(scores)
        if len(reply.logprobs) != len(reply.token_ids):
            raise ValueError(f"call {scores.call} has {len(reply.token_ids)} tokens, {len(reply.logprobs)} with scores")
    for scores in message.prompt_logprobs:
        _of(scores.call, replies).prompt_logprobs = _decode_logprobs(scores)
    return replies


def _follow_one_another(rounds: Sequence[RoundCounts]) -> bool:
    end = 0
    for counts in rounds:
        if counts.start != end:
            return False
        end += counts.num_accepted_tokens + 1
    return True


def _starts(counts: Sequence[tuple[int, int]], num_rounds: Sequence[int]) -> list[int]:
    """Returns the start of each round. `counts`: (drafts, accepted drafts) by round; `num_rounds`: rounds by call."""
    starts: list[int] = []
    for own in split(counts, num_rounds):
        start = 0
        for _, num_accepted in own:
            starts.append(start)
            start += num_accepted + 1
    return starts


def _encode_error(call: int, error: OutriderError) -> target_pb2.CallError:
    return target_pb2.CallError(
        call=call, code=error.grpc_code.value[0], message=error.message, param=error.param or ""
    )


def _encode_logprobs(call: int, scores: TokenLogprobs) -> target_pb2.CallLogprobs:
    return target_pb2.CallLogprobs(
        call=call,
        ranks=scores.ranks,
        logprobs=scores.logprobs,
        top_token_ids=scores.top_token_ids,
        top_logprobs=scores.top_logprobs,
    )


def _decode_logprobs(scores: target_pb2.CallLogprobs) -> TokenLogprobs:
    num_tokens, num_top = len(scores.logprobs), len(scores.top_token_ids)
    width = num_top // max(1, num_tokens)
    if len(scores.ranks) != num_tokens or width * num_tokens != num_top or len(scores.top_logprobs) != num_top:
        raise ValueError(f"the columns of the log-probabilities of call {scores.call} do not match")
    return TokenLogprobs(width, scores.ranks[:], scores.logprobs[:], scores.top_token_ids[:], scores.top_logprobs[:])


def _of(call: int, replies: Mapping[int, CallReply]) -> CallReply:
    reply = replies.get(call)
    if reply is None:
        raise ValueError(f"call {call} ends without an entry")
    return reply
