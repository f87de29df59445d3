"""Limits of what a target may send: replies to a call, and descriptions. What exceeds them is unusable."""

from __future__ import annotations

from cluster.logprobs import MAX_LOGPROBS
from cluster.wire.replies import CallReply
from protos.speculation.v1 import target_pb2

_MAX_ROUND_DRAFTS = 1024
_MAX_TRAITS = 64
_MAX_EOS_TOKENS = 1024
# Maximum sizes in a message. A round has at least one token, so a token has at most the counts of one round.
_CALL_BYTES = 1024
_TOKEN_BYTES = 5 * 4
_SCORE_BYTES = (1 + MAX_LOGPROBS) * (5 + 4)


class ReplyLimits:
    """Bounds the replies to one call by its request."""

    def __init__(self, request: target_pb2.GenerateRequest, vocab_size: int | None) -> None:
        """`vocab_size`: None: unknown."""
        self._vocab_size = vocab_size
        self._num_tokens = request.max_tokens - request.num_generated_tokens
        self._width = request.num_logprobs if request.HasField("num_logprobs") else None
        self._prompt_width = request.num_prompt_logprobs
        self._num_prompt_scores = len(request.prompt_token_ids) if request.HasField("num_prompt_logprobs") else 0
        num_scores = self._num_prompt_scores + (self._num_tokens if request.HasField("num_logprobs") else 0)
        self.max_bytes = _CALL_BYTES + _TOKEN_BYTES * self._num_tokens + _SCORE_BYTES * num_scores

    def check(self, reply: CallReply) -> None:
        """Counts `reply`. Raises ValueError if the request does not allow it."""
        self._num_tokens -= len(reply.token_ids)
        if self._num_tokens < 0:
            raise ValueError("a call has more tokens than were requested")
        if self._vocab_size is not None and max(reply.token_ids, default=0) >= self._vocab_size:
            raise ValueError("a call has a token outside of the vocabulary")
        for num_draft_tokens, num_accepted_tokens, _ in reply.rounds:
            if not num_accepted_tokens <= num_draft_tokens <= _MAX_ROUND_DRAFTS:
                raise ValueError(f"a round has {num_draft_tokens} drafts, {num_accepted_tokens} accepted")
        if reply.logprobs and reply.logprobs.width != self._width:
            raise ValueError(f"a token has {reply.logprobs.width} alternatives, of {self._width} requested")
        if reply.prompt_logprobs:
            self._num_prompt_scores -= len(reply.prompt_logprobs)
            if self._num_prompt_scores < 0 or reply.prompt_logprobs.width != self._prompt_width:
                raise ValueError("a call has other log-probabilities of its prompt than were requested")


def check_description(description: target_pb2.TargetDescription) -> None:
    """Raises ValueError if no worker could have `description`."""
    model = description.model
    if not (model.vocab_size and model.max_model_len):
        raise ValueError(f"its vocabulary has {model.vocab_size} tokens, its context {model.max_model_len}")
    if len(description.traits) > _MAX_TRAITS:
        raise ValueError(f"it has {len(description.traits)} traits")
    if len(description.eos_token_ids) > _MAX_EOS_TOKENS:
        raise ValueError(f"it has {len(description.eos_token_ids)} end tokens")
