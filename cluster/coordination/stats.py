"""What a coordinator counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class CoordinatorStats:
    """Counted since the start."""

    num_stale_proposals: int = 0  # the target had chosen otherwise, or gone past them, by the time they came
    num_late_rounds: int = 0  # a step that gave up waiting for a proposal
    num_invalid_token_ids: int = 0  # drafts outside the target's vocabulary
    num_excess_token_ids: int = 0  # drafts beyond the window they were granted
    num_refused: int = 0
    num_lost: int = 0
    num_without_credit: int = 0  # times that no draft worker had room for a sequence
    depths: Counter[int] = field(default_factory=Counter)  # of a sequence in a step, by what was wanted
    plain_decodes: Counter[str] = field(default_factory=Counter)  # of a sequence in a step, by reason
    seconds: float = 0.0  # of the processor, spent on the rounds by the engine's thread
