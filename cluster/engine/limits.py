"""Limits on the work that a worker does at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cluster.config.workers import TargetConfig, WorkerConfig


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits on the running sequences and on a step over them."""

    max_model_len: int  # tokens of a sequence, prompt and generated
    max_num_seqs: int  # sequences that run at once
    max_num_batched_tokens: int  # tokens in one step
    max_prefill_seconds: float | None = None  # time that prompts may add to a step; None: unlimited
    first_token_limit: float = math.inf  # seconds from arrival to first token that requests should keep

    @classmethod
    def of(cls, config: WorkerConfig, max_model_len: int) -> StepLimits:
        """Returns the limits that `config` sets, for a model that takes `max_model_len` tokens."""
        first_token_limit = config.first_token_limit if isinstance(config, TargetConfig) else math.inf
        return cls(
            max_model_len,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.max_prefill_seconds,
            first_token_limit,
        )
