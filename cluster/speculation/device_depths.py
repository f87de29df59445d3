"""Chooses the depth of drafts that the target's own device makes: one depth for all sequences of a step.

Each step verifies the drafts of the previous step, and then drafts for the next step. A least-squares fit over recent
steps without prompts predicts its duration:

    seconds = fixed + row * rows + [depth > 0] * first + level * depth

The chosen depth is the one with the most expected tokens per second. The expected tokens of n sequences are n plus the
sum of the survival probabilities of all drafts (Leviathan et al. 2023, equation 1, with measured acceptance by
position).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cluster.speculation.acceptance_model import PositionRates, SequenceAcceptance, kind_of, own_rates
from cluster.speculation.speed import best_prefix
from cluster.speculation.tuning import (
    CLIP,
    KEEP,
    LEAST_GAIN,
    PLAN_STEPS,
    PRIOR,
    TRIAL_COST,
    WINDOW,
    has_load_changed,
)

FloatArray = npt.NDArray[np.float64]

_TRIAL_PLANS = WINDOW // PLAN_STEPS  # plans of a trial, and plans without drafts in a row after which drafting ends


class DeviceDepths:
    """Chooses depths from measured steps. Must only be used by the engine's thread."""

    def __init__(self, max_depth: int, initial_depth: int) -> None:
        self.max_depth = max_depth
        self._depth = min(initial_depth, max_depth)
        self._sums = _Sums()
        self._tried: _Sums | None = None
        self._rates: dict[float, PositionRates] = {}  # by temperature
        self._num_sequences = 0  # number of sequences at the last plan
        self._steps_to_plan = 0
        self._num_plans = self._plans_to_trial = 0

    def acceptance(self, temperature: float) -> SequenceAcceptance:
        """Returns the acceptance of a new sequence. The caller must call its `observe` for each round."""
        kind = kind_of(temperature)
        if kind not in self._rates:
            self._rates[kind] = PositionRates(self.max_depth)
        return SequenceAcceptance(self._rates[kind])

    def tried(self) -> None:
        """Ends the trial phase: the steps so far tried every depth, before the first request."""
        self._sums.weigh(PRIOR)
        self._tried, self._sums = self._sums, _Sums()

    def observe(self, num_rows: int, depth: int, seconds: float) -> None:
        """Learns from a step that verified `num_rows` rows and then drafted `depth` tokens for each sequence."""
        if self._tried is not None:
            self._sums.fade(KEEP)
            predicted = float(_features(num_rows, depth) @ self._costs())
            seconds = min(seconds, CLIP * predicted) if predicted > 0 else seconds
        self._sums.add(_features(num_rows, depth), seconds)

    def next_depth(self, sequences: Sequence[SequenceAcceptance]) -> int:
        """Returns the depth of the next drafts for `sequences`, which run or are about to run.

        Drafting begins with the first plan that chooses drafts. It ends only after many plans without drafts, because
        the running sequences then get no more drafts: the draft model's cache lacks their tokens of a step. After that,
        occasional trials draft one token per step, because acceptance may have changed.
        """
        number = len(sequences)
        self._steps_to_plan -= 1
        if self._tried is None or (self._steps_to_plan > 0 and not has_load_changed(number, self._num_sequences)):
            return self._depth
        self._steps_to_plan, self._num_sequences = PLAN_STEPS, number
        self._num_plans += 1
        self._depth, trial_cost = self._best(sequences)
        if self._depth:
            self._plans_to_trial = 0
            if self._num_plans % PLAN_STEPS == 0:  # measures the acceptance of a deeper draft
                self._depth = min(self._depth + 1, self.max_depth)
        else:
            self._plans_to_trial -= 1
            self._depth = int(self._plans_to_trial < 0)
            if self._plans_to_trial <= -_TRIAL_PLANS:
                self._plans_to_trial = int(_TRIAL_PLANS * trial_cost / TRIAL_COST)
        return self._depth

    def _best(self, sequences: Sequence[SequenceAcceptance]) -> tuple[int, float]:
        """Returns the best depth, and the time that one draft adds to a step, as a share of a step without drafts."""
        survival = np.cumprod(own_rates(sequences), axis=1).sum(axis=0)  # [max_depth]
        number, depths = len(sequences), range(self.max_depth + 1)
        seconds = np.stack([_features(number * (1 + depth), depth) for depth in depths]) @ self._costs()
        rate, (best,) = best_prefix(number + np.cumsum(np.concatenate([[0.0], survival])), seconds)
        plain = max(float(seconds[0]), 1e-9)
        return best if rate >= LEAST_GAIN * number / plain else 0, float(seconds[min(1, self.max_depth)]) / plain - 1.0

    def _costs(self) -> FloatArray:
        """Returns the four costs in seconds: fixed, per row, for the first draft level, and per level."""
        assert self._tried is not None
        return self._sums.fit(self._tried)


class _Sums:
    """Sums of a least-squares fit."""

    def __init__(self) -> None:
        self._products = np.zeros((4, 4))
        self._targets = np.zeros(4)

    def add(self, features: FloatArray, seconds: float) -> None:
        self._products += np.outer(features, features)
        self._targets += features * seconds

    def fade(self, share: float) -> None:
        self._products *= share
        self._targets *= share

    def weigh(self, num_steps: float) -> None:
        """Scales the added steps to the weight of `num_steps` steps."""
        if self._products[0, 0] > 0:
            self.fade(num_steps / self._products[0, 0])

    def fit(self, other: _Sums) -> FloatArray:
        """Returns the four costs, none negative, fitted to the steps of both sums."""
        solved = np.linalg.lstsq(self._products + other._products, self._targets + other._targets, rcond=None)[0]
        return np.asarray(np.maximum(solved, 0.0), np.float64)


def _features(num_rows: float, depth: int) -> FloatArray:
    return np.array([1.0, num_rows, depth > 0, depth], np.float64)
