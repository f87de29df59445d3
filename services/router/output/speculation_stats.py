"""Statistics of speculation for one choice, for clients that request them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class SpeculationStats:
    num_drafts: int = 0  # rounds that verified at least one draft token
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    max_draft_tokens: int = 0  # maximum in one round
    acceptance_histogram: list[int] = field(default_factory=list)  # rounds by their number of accepted drafts

    def count_round(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Counts one round that verified draft tokens."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        self.max_draft_tokens = max(self.max_draft_tokens, num_draft_tokens)
        missing = num_accepted_tokens + 1 - len(self.acceptance_histogram)
        self.acceptance_histogram.extend([0] * missing)
        self.acceptance_histogram[num_accepted_tokens] += 1

    def to_json(self) -> dict[str, Any]:
        """Returns the statistics as JSON. Rates are null for a choice without drafts."""
        has_drafts = self.num_drafts > 0
        return {
            "mean_acceptance_length": 1 + self.num_accepted_tokens / self.num_drafts if has_drafts else None,
            "draft_acceptance_rate": self.num_accepted_tokens / self.num_draft_tokens if has_drafts else None,
            "acceptance_histogram": self.acceptance_histogram,
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
        }

    def to_vllm(self) -> dict[str, Any]:
        """Returns the statistics with the names of vLLM's `metrics.speculative_decoding`.

        There must be at least one round with drafts. vLLM's `num_spec_tokens` is the configured number of drafts; here
        it is the largest number in one round, as the target chooses it.
        """
        missing = self.max_draft_tokens + 1 - len(self.acceptance_histogram)
        return {
            "mean_acceptance_length": 1 + self.num_accepted_tokens / self.num_drafts,
            "draft_acceptance_rate": self.num_accepted_tokens / self.num_draft_tokens,
            "acceptance_histogram": [*self.acceptance_histogram, *([0] * missing)],
            "num_spec_steps": self.num_drafts,
            "num_accepted_draft_tokens": self.num_accepted_tokens,
            "num_draft_tokens": self.num_draft_tokens,
            "num_spec_tokens": self.max_draft_tokens,
        }
