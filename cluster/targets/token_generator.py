"""One generation on an engine that this project schedules itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cluster.coordination.sequence import SpeculativeSequence
from cluster.engine import sequence as engine
from cluster.engine.constraint import TokenConstraint
from cluster.engine.scheduler import ScheduledSequence
from cluster.errors import OutriderError
from cluster.speculation.token_counts import TokenCounts
from cluster.targets.base import GenerationRequest, TargetModel


@dataclass(eq=False, slots=True, kw_only=True)
class Generation(engine.Sequence):
    """A generation: its request, its state in the engine, and the coordinator's state.

    All three share one list of tokens.
    """

    request: GenerationRequest
    speculative: SpeculativeSequence
    constraint: TokenConstraint | None = None
    counts: TokenCounts | None = None  # counts of its tokens, for penalties

    @classmethod
    def of(cls, request: GenerationRequest, model: TargetModel, max_drafts: int) -> Generation:
        """Returns a generation that has not run yet. `max_drafts`: maximum drafts per round if `request` sets none."""
        token_ids, asked = list(request.token_ids), request.num_speculative_tokens
        end_token_ids = request.end_token_ids(model)
        max_len = request.num_prompt_tokens + request.max_tokens
        return cls(
            token_ids=token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            max_len=max_len,
            end_token_ids=end_token_ids,
            max_drafts=max_drafts if asked is None else asked,
            priority=request.priority,
            owner=request.owner,
            cache_root=request.cache_root or None,
            first_unscored=None if request.num_prompt_logprobs is None else 1,
            constraint=TokenConstraint.of(
                request.constraints,
                request.grammar,
                model.vocab_size,
                end_token_ids,
                token_ids[request.num_prompt_tokens :],
            ),
            request=request,
            speculative=SpeculativeSequence(
                token_ids,
                request.num_prompt_tokens,
                request.params,
                request.noise_key,
                asked,
                max_len,
                request.cache_root,
                request.conversation,
                request.output_limit,
                request.owner,
            ),
        )

    @property
    def error(self) -> OutriderError | None:
        """The error that ends the generation; None if there is none."""
        return None if self.constraint is None else self.constraint.error

    @property
    def needs_host(self) -> bool:
        """True if the host has to act between two of its steps: to apply a grammar, or to read logits or tokens."""
        request = self.request
        return (
            self.constraint is not None
            or request.params.has_penalty
            or request.num_logprobs is not None
            or self.is_scoring
        )

    def count(self, device: torch.device, vocab_size: int) -> TokenCounts | None:
        """Returns the counts of all tokens so far; None if the request has no penalty."""
        if not self.request.params.has_penalty:
            return None
        if self.counts is None:
            self.counts = TokenCounts(vocab_size, device)
        self.counts.count(self.token_ids, len(self.token_ids), self.num_prompt_tokens)
        return self.counts

    def commit(self, token_ids: Sequence[int]) -> int:
        if self.constraint is None:
            return engine.Sequence.commit(self, token_ids)
        for count, token in enumerate(token_ids, start=1):
            if not self.constraint.commit(token):
                return count - 1
            engine.Sequence.commit(self, (token,))
            if self.finish_reason is None and self.constraint.is_complete:
                self.finish_reason = engine.FinishReason.STOP
            if self.finish_reason is not None:
                return count
        return len(token_ids)


Scheduled = ScheduledSequence[Generation]
