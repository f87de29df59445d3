"""Predicts the gain of drafts for a target, which decides the number of draft workers."""

from __future__ import annotations

import math
from dataclasses import dataclass

NUM_BATCHES = 10  # 1, 2, 4, ... 512 sequences per draft worker


@dataclass(frozen=True, slots=True)
class DraftDemand:
    """Demand of one target for drafts, measured by its controller."""

    num_sequences: int  # number of sequences that drafts may be made for
    goodputs: tuple[float, ...]  # tokens per second over plain decoding, for 1, 2, 4, ... sequences per draft worker

    def goodput(self, batch: float) -> float:
        """Returns the tokens per second over plain decoding with `batch` sequences per draft worker, at least 1.

        `batch` includes the sequences of other targets.
        """
        place = min(max(math.log2(max(batch, 1.0)), 0.0), len(self.goodputs) - 1.0)
        index = min(int(place), len(self.goodputs) - 2)
        share = place - index
        return max(1.0, (1.0 - share) * self.goodputs[index] + share * self.goodputs[index + 1])
