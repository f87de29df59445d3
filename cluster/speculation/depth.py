"""How much to speculate: how many draft tokens each sequence gets in the next round, and of what tree.

A controller is asked once in some steps, for all sequences together, because they share the step's time. A new one is a
class with `needs`, `choose` and `observe`, and a line in `make_controller`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cluster.config_speculation import SpeculationConfig
from cluster.speculation.acceptance_model import FloatArray, SequenceAcceptance, own_rates, survivals
from cluster.speculation.costs import LinkCosts
from cluster.speculation.prompts import StepSeconds
from cluster.speculation.tree_policy import DEPTH_LIMITS, LEAST_GAIN, Template

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Needs:
    """What a controller must be given to choose well."""

    # Each sequence's acceptance and the times of steps: they are learned, and before some step's time is known it is
    # not asked. Where they are, a step also weighs whether a wait for proposals pays.
    measurements: bool = False
    probing: bool = False  # steps of the kind that is not the rule, and shadows while nothing is speculated on


@dataclass(slots=True)
class Candidate:
    """A sequence that may be drafted for in the next step."""

    acceptance: SequenceAcceptance
    max_depth: int
    costs: LinkCosts | None  # of the link it is drafted for on; None: waits are left out
    fixed_depth: int | None = None  # what its request asked for


@dataclass(frozen=True, slots=True)
class NextStep:
    """What depths are chosen for."""

    candidates: Sequence[Candidate]
    num_rows: int  # of the step without drafts
    templates: Sequence[Template] = ()  # drafts may be trees that are cut from one of these
    min_gain: float = 1.0  # what speculation must promise, in proportion to none


@dataclass(frozen=True, slots=True)
class Columns:
    """Candidates of which none asked for a depth of its own, as arrays of one entry each."""

    rates: FloatArray  # [candidates, depths], acceptance by position
    max_depths: IntArray
    links: IntArray  # places in `costs`; -1: waits are left out
    costs: Sequence[LinkCosts]

    @classmethod
    def of(cls, candidates: Sequence[Candidate]) -> Columns:
        places: dict[int, int] = {}
        costs: list[LinkCosts] = []
        links = []
        for candidate in candidates:
            own = candidate.costs
            if own is not None and id(own) not in places:
                places[id(own)] = len(costs)
                costs.append(own)
            links.append(-1 if own is None else places[id(own)])
        max_depths = np.array([candidate.max_depth for candidate in candidates], np.int64)
        return cls(own_rates([c.acceptance for c in candidates]), max_depths, np.array(links, np.int64), costs)


@dataclass(slots=True)
class Choice:
    """What the candidates get."""

    num_drafts: list[int]
    expected_tokens: list[float]  # that a round of each commits
    template: Template | None = None  # from which trees of those numbers of nodes are cut; None: chains
    rate: float = 0.0  # tokens a second that this promises in steps without prompts


@dataclass(frozen=True, slots=True)
class ColumnChoice:
    """What the candidates get, as `Choice` has it."""

    num_drafts: IntArray
    expected_tokens: FloatArray
    template: Template | None = None
    rate: float = 0.0


class DepthController(Protocol):
    needs: Needs

    def choose(self, step: NextStep) -> Choice:
        """Draft tokens for each candidate."""

    def observe(self, rounds: Sequence[tuple[int, int]]) -> None:
        """The rounds of one step: (drafts, accepted) of each that had drafts."""


class FixedController:
    """Always `num_speculative_tokens`."""

    needs = Needs()

    def __init__(self, num_speculative_tokens: int) -> None:
        self._num_speculative_tokens = num_speculative_tokens

    def choose(self, step: NextStep) -> Choice:
        return _same_for_all(self._num_speculative_tokens, step.candidates)

    def observe(self, rounds: Sequence[tuple[int, int]]) -> None:
        """Nothing changes its mind."""


class ThresholdController:
    """One depth for all, moved by the mean acceptance of the last rounds.

    Over 0.9 it grows by one, over 0.8 it stays, over 0.6 it shrinks by one (while it is over 3), and else by two.
    The window of 100 rounds begins anew after every change, so that a depth is judged by its own rounds.
    """

    needs = Needs()
    _WINDOW = 100
    _MIN_ROUNDS = 10

    def __init__(self, num_speculative_tokens: int, maximum: int) -> None:
        self._depth = num_speculative_tokens
        self._maximum = maximum
        self._rounds: deque[tuple[int, int]] = deque(maxlen=self._WINDOW)

    def choose(self, step: NextStep) -> Choice:
        return _same_for_all(self._depth, step.candidates)

    def observe(self, rounds: Sequence[tuple[int, int]]) -> None:
        for num_drafts, num_accepted in rounds:
            self._observe_round(num_drafts, num_accepted)

    def _observe_round(self, num_drafts: int, num_accepted: int) -> None:
        self._rounds.append((num_drafts, num_accepted))
        if len(self._rounds) < self._MIN_ROUNDS:
            return
        acceptance = sum(accepted for _, accepted in self._rounds) / sum(drafts for drafts, _ in self._rounds)
        if acceptance > 0.9:
            change = 1
        elif acceptance > 0.8:
            change = 0
        elif acceptance > 0.6:
            change = -1 if self._depth > 3 else 0
        else:
            change = -2
        depth = min(max(1, self._depth + change), self._maximum)
        if depth != self._depth:
            self._depth = depth
            self._rounds.clear()


class GoodputController:
    """Expected committed tokens over the time of the step, for the step as a whole.

    A draft token is worth the probability that it is committed and costs what it adds to the step: rows to verify,
    and time to wait for it. Tokens are taken by their worth, the best first, as far as the ratio of all worth to all
    time grows. The wait depends on the deepest sequence of a link, so this is done under several limits of depth.
    Of a tree the tokens are its nodes and their depth is their level: broader costs rows, deeper costs time to wait.
    """

    needs = Needs(measurements=True, probing=True)

    def __init__(self, steps: StepSeconds, max_wait_seconds: float) -> None:
        self._steps = steps
        self._max_wait_seconds = max_wait_seconds

    def observe(self, rounds: Sequence[tuple[int, int]]) -> None:
        """It learns from each sequence's acceptance."""

    def choose(self, step: NextStep) -> Choice:
        candidates = step.candidates
        num_drafts = [min(c.fixed_depth or 0, c.max_depth) for c in candidates]
        expected = [1.0 + sum(c.acceptance.survival()[:n]) for c, n in zip(candidates, num_drafts, strict=True)]
        choice = Choice(num_drafts, expected)
        free = [i for i, c in enumerate(candidates) if c.fixed_depth is None and c.max_depth > 0]
        if not free:
            return choice
        columns = Columns.of([candidates[i] for i in free])
        num_other_rows = step.num_rows + sum(num_drafts)
        max_drafts = self._steps.room_for_drafts(step.num_rows) - sum(num_drafts)
        best = self._choose(columns, num_other_rows, max_drafts, step.min_gain, None)
        least_rate = LEAST_GAIN * best.rate
        for template in step.templates:
            trees = self._choose(columns, num_other_rows, max_drafts, step.min_gain, template)
            if trees.rate >= max(least_rate, best.rate):
                best = trees
        for index, number, tokens in zip(free, best.num_drafts.tolist(), best.expected_tokens.tolist(), strict=True):
            num_drafts[index], expected[index] = number, tokens
        choice.template, choice.rate = best.template, best.rate
        return choice

    def _choose(
        self, columns: Columns, num_rows: int, max_drafts: int, min_gain: float, template: Template | None
    ) -> ColumnChoice:
        num_candidates = len(columns.rates)
        worth = np.cumprod(columns.rates, axis=1) if template is None else template.survivals(columns.rates)
        place = np.broadcast_to(np.arange(1, worth.shape[1] + 1), worth.shape)
        allowed = place <= columns.max_depths[:, None]
        # Stable, and worth never rises along a row: a sequence's tokens come in the order of their places.
        order = np.argsort(np.where(allowed, -worth, np.inf), axis=None, kind="stable")[: int(allowed.sum())]
        worth, place = worth.ravel()[order], place.ravel()[order]
        sequence_of = order // allowed.shape[1]
        depth_of = place if template is None else template.levels[place - 1]
        link_of = columns.links[sequence_of]
        deepest = int(depth_of.max(initial=0))
        limits = np.array([*(limit for limit in DEPTH_LIMITS if limit < deepest and template is None), deepest])[
            :, None
        ]
        taken = depth_of <= limits  # [limits, tokens], and so is everything from here on
        num_taken = np.cumsum(taken, axis=1)
        wait = np.zeros(taken.shape)
        for link, link_costs in enumerate(columns.costs):
            own = np.flatnonzero(link_of == link)
            if not own.size or not link_costs.is_known:
                continue
            on_link = taken[:, own]
            reached = np.maximum.accumulate(np.where(on_link, depth_of[own], 0), axis=1)
            batch = np.cumsum(on_link & (place[own] == 1), axis=1)
            wait[:, own] = link_costs.wait_seconds(reached, batch)
        wait = np.maximum.accumulate(wait, axis=1)  # no link's wait grows shorter with another token
        tokens = num_rows + np.cumsum(np.where(taken, worth, 0.0), axis=1)
        with_waits = self._steps.at(num_rows + num_taken, tokens) + self._steps.num_steps(tokens) * wait
        token_rates = tokens / with_waits
        fits = (wait <= self._max_wait_seconds) & (num_taken <= max_drafts)
        token_rates = np.where(fits, token_rates, 0.0)
        limit, last = np.unravel_index(token_rates.argmax(), token_rates.shape)
        plain_seconds = float(self._steps.at(np.array([num_rows]), np.array([float(num_rows)]))[0])
        if token_rates[limit, last] <= min_gain * num_rows / plain_seconds:
            rate = num_rows / self._steps.verify.seconds(num_rows)
            return ColumnChoice(np.zeros(num_candidates, np.int64), np.ones(num_candidates), None, rate)
        seconds = self._steps.verify.seconds(num_rows + int(num_taken[limit, last])) + float(wait[limit, last])
        is_best = taken[limit, : last + 1]
        best = sequence_of[: last + 1][is_best]
        own_tokens = np.bincount(best, worth[: last + 1][is_best], num_candidates)
        return ColumnChoice(
            np.bincount(best, minlength=num_candidates),
            np.asarray(1.0 + own_tokens, np.float64),
            template,
            float(tokens[limit, last]) / seconds,
        )


def _same_for_all(num_drafts: int, candidates: Sequence[Candidate]) -> Choice:
    depths = [min(num_drafts if c.fixed_depth is None else c.fixed_depth, c.max_depth) for c in candidates]
    survival = survivals([candidate.acceptance for candidate in candidates]) if candidates else ()
    expected = [1.0 + float(own[:depth].sum()) for own, depth in zip(survival, depths, strict=True)]
    return Choice(depths, expected)


def make_controller(config: SpeculationConfig, steps: StepSeconds) -> DepthController:
    """The controller that `config` names; `steps` are what `goodput` reckons with."""
    if config.controller == "fixed":
        return FixedController(config.num_speculative_tokens)
    if config.controller == "threshold":
        return ThresholdController(config.num_speculative_tokens, config.max_speculative_tokens)
    return GoodputController(steps, config.draft_timeout_ms / 1e3)
