"""Describes the gain that a target expects from drafts. The number of draft workers depends on it."""

from __future__ import annotations

import math
from dataclasses import dataclass

NUM_BATCHES = 10  # 1, 2, 4, ... 512 sequences per draft worker


@dataclass(frozen=True, slots=True)
class DraftDemand:
    """Demand of one target for drafts, measured by its controller."""

    num_sequences: int  # number of sequences that may get drafts
    goodputs: tuple[float, ...]  # gain with 1, 2, 4, ... sequences per draft worker, as `goodput` returns it

    def goodput(self, batch: float) -> float:
        """Returns the ratio of tokens per second with drafts to tokens per second without, at least 1.

        `batch`: number of sequences per draft worker, including those of other targets.
        """
        place = min(max(math.log2(max(batch, 1.0)), 0.0), len(self.goodputs) - 1.0)
        index = min(int(place), len(self.goodputs) - 2)
        share = place - index
        return max(1.0, (1.0 - share) * self.goodputs[index] + share * self.goodputs[index + 1])
