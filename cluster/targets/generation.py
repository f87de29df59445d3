"""One generation on an engine that this project schedules itself."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.coordination.sequence import SpeculativeSequence
from cluster.engine import sequence as engine
from cluster.engine.scheduler import ScheduledSequence
from cluster.targets.base import GenerationRequest


@dataclass(eq=False, slots=True, kw_only=True)
class Generation(engine.Sequence):
    """One generation: its state in the engine, what was asked for, and what the coordinator keeps of it.

    All three share one list of tokens.
    """

    request: GenerationRequest
    speculative: SpeculativeSequence

    @classmethod
    def of(cls, request: GenerationRequest, eos_token_ids: tuple[int, ...], max_drafts: int) -> Generation:
        """Before its first step; `max_drafts` in a round where `request` does not say."""
        token_ids, asked = list(request.token_ids), request.num_speculative_tokens
        max_len = request.num_prompt_tokens + request.max_tokens
        return cls(
            token_ids=token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            max_len=max_len,
            eos_token_ids=frozenset() if request.ignore_eos else frozenset(eos_token_ids),
            num_speculative_tokens=max_drafts if asked is None else asked,
            request=request,
            speculative=SpeculativeSequence(
                token_ids, request.num_prompt_tokens, request.params, request.noise_key, asked, max_len
            ),
        )


Scheduled = ScheduledSequence[Generation]
