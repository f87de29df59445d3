"""Reserves rows for drafts in a step that is scheduled while the step before it still runs.

vLLM's asynchronous scheduler submits a step before its drafts are known (`cluster.vllm.core.async_scheduler`). A row
takes the same time with or without a draft. So rows are added in the order of their worth: the probability that the
draft comes, times the probability that it is accepted. The number of rows maximises the predicted tokens per second.

Whether drafts come depends on what the running step verifies. A drafter that does not run ahead only has what is left
of the proposal that is being verified.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from enum import Enum

import numpy as np

from cluster.coordination.sequence import SpeculativeSequence
from cluster.speculation.acceptance_model import FloatArray, PositionRates
from cluster.speculation.drafts import Drafts
from cluster.speculation.speed import best_prefix
from cluster.speculation.step_times import StepTimes
from cluster.speculation.tuning import KEEP


class _Verified(Enum):
    """Part of a sequence's proposal that the running step verifies."""

    NONE = 0
    WHOLE = 1  # nothing of the proposal is left after the step
    PART = 2  # if all are accepted, tokens of the proposal are left


class RowReservations:
    """Reserves rows for each step, and learns how many drafts come. Must only be used by the engine's thread."""

    def __init__(self, steps: StepTimes, max_depth: int) -> None:
        self._steps = steps
        # Decayed counts by n, from 1: sequences with at least n rows, and with at least n drafts that came.
        self._tried = {part: np.ones(max_depth) for part in _Verified}
        self._came = {part: np.ones(max_depth) for part in _Verified}
        self._reserved: dict[SpeculativeSequence, tuple[_Verified, int]] = {}

    def reserve(
        self,
        depths: Mapping[SpeculativeSequence, int],
        verified: Mapping[SpeculativeSequence, Drafts],
        num_other_rows: int,
    ) -> dict[SpeculativeSequence, int]:
        """Returns the number of rows for the drafts of each sequence in the next step.

        `depths`: maximum drafts of each sequence; `verified`: drafts that the running step verifies, empty if none
        runs. `num_other_rows`: rows of the step that are not for these drafts.
        """
        if verified:
            self._learn(verified)
        groups: dict[tuple[_Verified, PositionRates], list[SpeculativeSequence]] = defaultdict(list)
        for sequence in depths:
            assert sequence.acceptance is not None
            groups[_part_verified(sequence, verified), sequence.acceptance.shared].append(sequence)
        rows = {}
        self._reserved = {}
        for (part, rates), most in self._most_rows(groups, depths, num_other_rows).items():
            for sequence in groups[part, rates]:
                rows[sequence] = min(depths[sequence], most)
                self._reserved[sequence] = part, rows[sequence]
        return rows

    def _learn(self, verified: Mapping[SpeculativeSequence, Drafts]) -> None:
        """Learns from the drafts that came for the last reserved rows."""
        seen = Counter(
            (part, num_rows, min(num_rows, len(verified[sequence])))
            for sequence, (part, num_rows) in self._reserved.items()
            if sequence in verified
        )
        for counts in (*self._tried.values(), *self._came.values()):
            counts *= KEEP
        for (part, num_rows, num_came), number in seen.items():
            self._tried[part][:num_rows] += number
            self._came[part][:num_came] += number

    def _most_rows(
        self,
        groups: Mapping[tuple[_Verified, PositionRates], Sequence[SpeculativeSequence]],
        depths: Mapping[SpeculativeSequence, int],
        num_other_rows: int,
    ) -> dict[tuple[_Verified, PositionRates], int]:
        """Returns the maximum rows for drafts per sequence, by group."""
        options = []  # worth of a row, number of rows, group
        for group, sequences in groups.items():
            part, rates = group
            worth = self._chances(part) * np.cumprod(rates.rates)
            for place in range(max(depths[sequence] for sequence in sequences)):
                number = sum(depths[sequence] > place for sequence in sequences)
                options.append((float(worth[place]), number, group))
        options.sort(key=lambda row: row[0], reverse=True)
        worths = np.array([0.0, *(worth * number for worth, number, _ in options)])
        numbers = np.array([0, *(number for _, number, _ in options)])
        seconds = self._steps.curve.at(num_other_rows + np.cumsum(numbers))
        _, (best,) = best_prefix(num_other_rows + np.cumsum(worths), seconds)
        most = dict.fromkeys(groups, 0)
        for _, _, group in options[:best]:
            most[group] += 1
        return most

    def _chances(self, part: _Verified) -> FloatArray:
        """Returns for each number of drafts, from 1, the probability that at least this number comes."""
        # Adding one success makes rows worth trying again once their counts have decayed.
        chances = (self._came[part] + 1.0) / (self._tried[part] + 1.0)
        return np.asarray(np.minimum.accumulate(chances), np.float64)


def _part_verified(sequence: SpeculativeSequence, verified: Mapping[SpeculativeSequence, Drafts]) -> _Verified:
    drafts = verified.get(sequence)
    if not drafts:
        return _Verified.NONE
    num_proposed = 0 if sequence.proposal is None else len(sequence.proposal.token_ids)
    num_committed = len(drafts) + 1  # if all are accepted
    return _Verified.PART if num_proposed > num_committed else _Verified.WHOLE
