"""The section `speculation` of the configuration."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, model_validator

from cluster.config.types import Section

_RUN_AHEAD_BRANCHES = 3


class SpeculationConfig(Section):
    num_speculative_tokens: Annotated[int, Field(ge=0, le=64)] = Field(
        4,
        description="draft tokens per round (k): the controller's first choice, or its fixed one; 0: no draft "
        "worker is started and the target gets every core",
    )
    max_speculative_tokens: Annotated[int, Field(ge=0, le=64)] = Field(
        16, description="maximum k of a controller and of a request"
    )
    controller: Literal["goodput", "fixed"] = Field(
        "goodput",
        description="how k is chosen: goodput, by measured times and acceptance; fixed, num_speculative_tokens",
    )
    acceptance: Literal["coupled", "greedy", "rejection", "engine"] = Field(
        "coupled",
        description="coupled: the draft uses the target's noise. For comparison: greedy, it proposes its most "
        "likely token, as engines do that exchange only token IDs; rejection, the target runs a copy of the "
        "draft for its probabilities, and the outcome depends on the draft; engine, vLLM samples and accepts by "
        "its own rule, without a promise about the outcome",
    )
    max_run_ahead: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="maximum number of tokens past the committed ones that a drafter may reach; within it, it "
        "reaches 2k+2; 0: only k; null: the 2k+2 of max_speculative_tokens, or 0 if the launcher finds that "
        "draft and target share cores",
    )
    tree_width: Annotated[int, Field(ge=1, le=8)] = Field(
        1,
        description="maximum children of a draft token: above 1 the drafts of a round form the tree that the "
        "measured acceptance makes best, which may be a chain; goodput chooses their number and the tree together",
    )
    tune_draft_temperature: bool = Field(
        True, description="search at run time for the draft temperature with the highest acceptance"
    )
    draft_timeout_ms: Annotated[float, Field(gt=0)] = Field(
        50.0, description="milliseconds that a step waits for a proposal before it decodes plainly"
    )
    suffix_bytes: Annotated[int, Field(ge=0)] = Field(
        0,
        description="bytes in which a target keeps recent tokens, to draft what followed a sequence's last tokens "
        "earlier: in it, or in another sequence with the same API key and cache salt; a sequence gets these drafts "
        "where more of them are expected to be accepted than of its drafter's. 0: none",
    )
    output_token_ms: PositiveFloat | None = Field(
        None,
        description="limit of an answer's mean milliseconds per output token after its first, at p99 over answers of "
        "at least 32 tokens: the controller chooses the k with the most tokens per second that is predicted to keep "
        "it, or else the k that comes closest; null: no limit. A request may set its own",
    )

    @model_validator(mode="after")
    def _limit_needs_a_choice(self) -> SpeculationConfig:
        if self.output_token_ms is not None and self.controller == "fixed" and self.num_speculative_tokens:
            raise ValueError(
                f"output_token_ms {self.output_token_ms:g} needs a controller that chooses k: set controller goodput, "
                "or num_speculative_tokens 0"
            )
        return self

    @model_validator(mode="after")
    def _default_within_limit(self) -> SpeculationConfig:
        if self.num_speculative_tokens > self.max_speculative_tokens:
            raise ValueError(
                f"num_speculative_tokens {self.num_speculative_tokens} exceeds max_speculative_tokens "
                f"{self.max_speculative_tokens}: raise the latter"
            )
        return self

    @model_validator(mode="after")
    def _rejection_can_verify(self) -> SpeculationConfig:
        if self.acceptance == "rejection" and self.tree_width > 1:
            raise ValueError(f"acceptance rejection verifies chains only: set tree_width 1, not {self.tree_width}")
        if self.acceptance == "rejection" and self.suffix_bytes:
            raise ValueError(
                f"acceptance rejection needs drafts from the draft's distribution: set suffix_bytes 0, not "
                f"{self.suffix_bytes}"
            )
        return self

    @property
    def draft_timeout_seconds(self) -> float:
        return self.draft_timeout_ms / 1e3

    @property
    def output_limit(self) -> float:
        """`output_token_ms` in seconds; infinite without a limit."""
        return math.inf if self.output_token_ms is None else self.output_token_ms / 1e3

    @property
    def tunes_draft_temperature(self) -> bool:
        """True unless disabled, or the target needs the distribution from which the draft sampled."""
        return self.tune_draft_temperature and self.acceptance != "rejection"

    @property
    def num_run_ahead_branches(self) -> int:
        """Number of next best drafts that run-ahead follows where the target may not choose the best."""
        return 0 if self.max_run_ahead == 0 else _RUN_AHEAD_BRANCHES

    def window(self, num_speculative_tokens: int) -> int:
        """Returns the maximum number of drafts after the committed tokens for a sequence with this k."""
        return window_of(num_speculative_tokens, self.granted_window)

    @property
    def granted_window(self) -> int:
        """Maximum number of drafts after the committed tokens for any k; a proposal of k tokens is always allowed."""
        if self.max_run_ahead is not None:
            return self.max_run_ahead
        return 2 * self.max_speculative_tokens + 2


def window_of(num_speculative_tokens: int, granted: int) -> int:
    """Returns the tokens by which a draft may run ahead: 2k + 2, but at most `granted` and at least k.

    They are two proposals of k = `num_speculative_tokens` tokens and the bonus tokens of two rounds.
    """
    return max(num_speculative_tokens, min(granted, 2 * num_speculative_tokens + 2))
