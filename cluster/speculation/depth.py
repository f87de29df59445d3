"""Chooses each sequence's number of draft tokens, and the shape of their tree.

A controller is called every few steps, for all sequences together, because they share the step's time. To add a
controller, write a class with `measures`, `choose` and `observe`, and add a line to `make_controller`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cluster.config.speculation import SpeculationConfig
from cluster.speculation.acceptance_model import FloatArray, SequenceAcceptance, own_rates
from cluster.speculation.answer_time import token_moments
from cluster.speculation.costs import LinkCosts
from cluster.speculation.output_limits import OrderedDrafts, OutputLimits
from cluster.speculation.speed import best_prefix, tokens_per_round
from cluster.speculation.step_times import StepTimes
from cluster.speculation.tree_policy import Template, depth_limits
from cluster.speculation.tuning import LEAST_GAIN, LIMIT_TOKENS

IntArray = npt.NDArray[np.int64]


@dataclass(slots=True)
class Candidate:
    """A sequence that may get drafts in the next step."""

    acceptance: SequenceAcceptance
    max_depth: int
    costs: LinkCosts | None  # costs of the sequence's link; None: no waits are predicted
    fixed_depth: int | None = None  # depth that the request set; None: the controller chooses
    output_limit: float = math.inf  # p99 of an answer's mean seconds per output token after its first


@dataclass(frozen=True, slots=True)
class NextStep:
    """The step for which depths are chosen."""

    candidates: Sequence[Candidate]
    num_rows: int  # rows of the step without drafts
    templates: Sequence[Template] = ()  # drafts may be trees: the leading nodes of one of these templates
    min_gain: float = 1.0  # drafts must be predicted to multiply the tokens per second by more than this
    other_limits: Sequence[float] = ()  # output limits of sequences that cannot get drafts
    answer_tokens: float = LIMIT_TOKENS  # tokens of an answer after its first, for the spread of its mean


@dataclass(slots=True)
class Choice:
    """The depths chosen for the candidates."""

    num_drafts: list[int]
    expected_tokens: list[float]  # expected tokens that a round of each sequence commits
    template: Template | None = None  # drafts are the first `num_drafts` nodes of this template; None: chains
    tokens_per_second: float = 0.0  # predicted for a step without prompts; 0: no prediction
    excess: float = 1.0  # largest predicted ratio of an output time (p99) to its limit, at least 1
    spare_seconds: float = math.inf  # time that prompts may add to every step within the limits


class DepthController(Protocol):
    # Whether the controller uses measured acceptance and step times. If it does, it starts after the first measured
    # step, and `DepthPlanner` adds plain steps and probes.
    measures: bool

    def choose(self, step: NextStep) -> Choice:
        """Returns the number of draft tokens for each candidate, with its predictions."""

    def observe(self, rounds: Sequence[tuple[int, int]]) -> None:
        """Learns from one step. `rounds`: (drafts, accepted drafts) of each round with drafts."""


class FixedController:
    """Chooses `num_speculative_tokens` for every sequence."""

    measures = False

    def __init__(self, num_speculative_tokens: int) -> None:
        self._num_speculative_tokens = num_speculative_tokens

    def choose(self, step: NextStep) -> Choice:
        return _same_for_all(self._num_speculative_tokens, step.candidates)

    def observe(self, rounds: Sequence[tuple[int, int]]) -> None:
        """Does nothing: the depth is fixed."""


class GoodputController:
    """Maximises the expected committed tokens per second of the whole step, within the limits of its sequences.

    The value of a draft token is the probability that it is committed. Its cost is the time that it adds to the step: a
    row to verify, and the wait for its proposal. The controller adds tokens in order of value, and keeps the number
    with the highest ratio of committed tokens to time. The wait depends on the deepest sequence of a link, so this
    search is repeated under several limits of depth. In a tree, tokens are nodes and their depth is their level:
    breadth costs rows, depth costs wait.

    Where no number of tokens keeps all limits of the time per output token, it minimises the largest excess.
    """

    measures = True

    def __init__(self, steps: StepTimes, max_wait_seconds: float) -> None:
        self._steps = steps
        self._max_wait_seconds = max_wait_seconds

    def observe(self, rounds: Sequence[tuple[int, int]]) -> None:
        """Does nothing: the candidates contain the acceptance."""

    def choose(self, step: NextStep) -> Choice:
        candidates = step.candidates
        num_drafts = [min(c.fixed_depth or 0, c.max_depth) for c in candidates]
        survivals = [c.acceptance.survival()[:n] if n else [] for c, n in zip(candidates, num_drafts, strict=True)]
        expected = list(map(tokens_per_round, survivals))
        choice = Choice(num_drafts, expected)
        free = [i for i, c in enumerate(candidates) if c.fixed_depth is None and c.max_depth > 0]
        if not free:
            return choice
        taken = sum(num_drafts)
        fixed_tokens = step.num_rows + sum(expected) - len(candidates)
        decided = [(limit, *token_moments([])) for limit in step.other_limits]
        decided += [
            (c.output_limit, *token_moments(survival))
            for c, survival in zip(candidates, survivals, strict=True)
            if c.fixed_depth is not None or c.max_depth == 0
        ]
        search = _Search(
            self._steps,
            [candidates[i] for i in free],
            num_rows=step.num_rows + taken,
            num_tokens=fixed_tokens,
            max_drafts=self._steps.room_for_drafts(step.num_rows) - taken,
            max_wait_seconds=self._max_wait_seconds,
            limits=OutputLimits([candidates[i].output_limit for i in free], decided, step.answer_tokens),
        )
        best = search.best(None, step.min_gain)
        least_rate = LEAST_GAIN * best.tokens_per_second
        for template in step.templates:
            trees = search.best(template, step.min_gain)
            if trees.excess <= best.excess and trees.tokens_per_second >= max(least_rate, best.tokens_per_second):
                best = trees
        for index, number, tokens in zip(free, best.num_drafts, best.expected_tokens, strict=True):
            num_drafts[index], expected[index] = number, tokens
        choice.template, choice.tokens_per_second = best.template, best.tokens_per_second
        choice.excess, choice.spare_seconds = best.excess, best.spare_seconds
        return choice


class _Search:
    """Finds the best numbers of drafts for the candidates without a fixed number."""

    def __init__(
        self,
        steps: StepTimes,
        candidates: Sequence[Candidate],
        *,
        num_rows: int,
        num_tokens: float,
        max_drafts: int,
        max_wait_seconds: float,
        limits: OutputLimits,
    ) -> None:
        """`num_rows`, `num_tokens`: rows and committed tokens of the step if `candidates` have no drafts."""
        self._steps = steps
        self._max_drafts = max_drafts
        self._max_wait_seconds = max_wait_seconds
        self._limits = limits
        self._num_rows = num_rows
        self._num_tokens = num_tokens
        self._rates = own_rates([candidate.acceptance for candidate in candidates])  # [candidates, depths]
        self._max_depths = np.array([candidate.max_depth for candidate in candidates], np.int64)
        self._costs = list({id(c.costs): c.costs for c in candidates if c.costs is not None}.values())
        place_of = {id(costs): place for place, costs in enumerate(self._costs)}
        self._links = np.array([place_of.get(id(c.costs), -1) for c in candidates], np.int64)
        if limits.are_set:
            chains = np.asarray(np.cumprod(self._rates, axis=1), np.float64)
            limits.drop_hopeless(chains, np.arange(1, chains.shape[1] + 1), steps.curve.seconds(num_rows))

    def best(self, template: Template | None, min_gain: float) -> Choice:
        """Returns the best numbers of drafts, in chains or in trees of the leading nodes of `template`.

        All numbers are 0 unless drafts are predicted to multiply the tokens per second by more than `min_gain`, or to
        come closer to the limits.
        Considers steps that wait until all sequences have their drafts, and steps that only use the drafts that are
        ready.
        """
        worth = np.asarray(
            np.cumprod(self._rates, axis=1) if template is None else template.survivals(self._rates), np.float64
        )
        levels = np.arange(1, worth.shape[1] + 1) if template is None else template.levels[: worth.shape[1]]
        ready = self._ready_shares(levels)
        found = []
        for first in self._limits.turns:
            for present in [None, ready] if ready.any() else [None]:
                found.append(self._most(worth, levels, template, present, min_gain, first))
            if all(is_free for *_, is_free in found):  # no limit forbids the drafts of most worth: the usual case
                break
        (negative_excess, rate), num_drafts, tokens_per_second, _ = max(found, key=itemgetter(0))
        plain_excess, plain_rate = self._plain()
        if (negative_excess, rate) <= (-plain_excess, min_gain * plain_rate):
            num_drafts, negative_excess, template, min_gain = np.zeros_like(num_drafts), -plain_excess, None, 1.0
            tokens_per_second = self._num_tokens / self._steps.curve.seconds(self._num_rows)
        gained = np.where(np.arange(worth.shape[1]) < num_drafts[:, None], worth, 0.0)
        seconds = max(1.0, min_gain) * (self._num_tokens + float(gained.sum())) / tokens_per_second
        spare = self._limits.longest_step(gained, levels) - seconds
        own_tokens = (1.0 + gained.sum(axis=1)).tolist()
        return Choice(num_drafts.tolist(), own_tokens, template, tokens_per_second, -negative_excess, spare)

    def _most(
        self,
        worth: FloatArray,
        levels: IntArray,
        template: Template | None,
        ready: FloatArray | None,
        min_gain: float,
        first: int | None,
    ) -> tuple[tuple[float, float], IntArray, float, bool]:
        """Returns the best numbers of drafts, their negative excess and rate, and their rate in steps without prompts.

        Last, whether they are also the best without limits.

        Rates are in tokens per second. `ready`: the probability that each draft is ready, for steps that do not
        wait; None for steps that wait. `min_gain` is also how much longer than predicted steps with drafts take.
        `first`: the class of sequences whose drafts are added before all others; None: in order of worth.
        """
        place = np.broadcast_to(np.arange(1, worth.shape[1] + 1), worth.shape)
        allowed = place <= self._max_depths[:, None]
        present = np.ones(worth.shape) if ready is None else ready
        worth = worth * present
        # The sort is stable and `worth` never rises along a row, so the tokens of a sequence keep their order.
        value = worth if first is None else worth + (self._limits.class_of == first)[:, None]
        order = np.argsort(np.where(allowed, -value, np.inf), axis=None, kind="stable")[: int(allowed.sum())]
        worth, place, present = worth.ravel()[order], place.ravel()[order], present.ravel()[order]
        sequence_of = order // allowed.shape[1]
        depth_of = levels[place - 1]
        deepest = int(depth_of.max(initial=0))
        caps = self._limits.caps(depth_limits(deepest) if template is None else [deepest], first)
        # [alternatives, tokens], as are all arrays from here on
        taken = depth_of <= caps[:, self._limits.class_of[sequence_of]]
        num_taken = np.cumsum(taken, axis=1)
        rows = num_taken if ready is None else np.cumsum(np.where(taken, present, 0.0), axis=1)
        if ready is None:
            wait = self._wait_seconds(taken, depth_of, place, self._links[sequence_of])
        else:
            wait = np.zeros(taken.shape)
        tokens = self._num_tokens + np.cumsum(np.where(taken, worth, 0.0), axis=1)
        fits = (wait <= self._max_wait_seconds) & (num_taken <= self._max_drafts)
        took = np.where(fits, self._steps.seconds(self._num_rows + rows, tokens, wait), np.inf)
        excess = np.where(fits, 1.0, np.inf)
        if self._limits.are_set:
            mean, variance = self._steps.step_moments(self._num_rows + rows, tokens)
            drafts = OrderedDrafts(taken, sequence_of, depth_of, worth)
            excess *= self._limits.excess(max(1.0, min_gain) * (mean + wait), variance, drafts)
        rate, (limit, last) = best_prefix(tokens, took, excess)
        seconds = self._steps.curve.seconds(self._num_rows + float(rows[limit, last])) + float(wait[limit, last])
        num_drafts = np.bincount(sequence_of[: last + 1][taken[limit, : last + 1]], minlength=len(self._rates))
        is_free = rate >= float((tokens / took).max())
        return (-float(excess[limit, last]), rate), num_drafts, float(tokens[limit, last]) / seconds, is_free

    def _ready_shares(self, levels: IntArray) -> FloatArray:
        """Returns the share of steps in which each candidate's draft is ready, [candidates, drafts].

        A link that is new is assumed to be as ready as the best of the others: without drafts it is never measured.
        """
        by_link = np.array([[0.0] * len(levels), *(costs.ready_at(levels) for costs in self._costs)])
        by_link[[False, *(not costs.is_readiness_known for costs in self._costs)]] = by_link.max(axis=0)
        return by_link[self._links + 1]

    def _plain(self) -> tuple[float, float]:
        """Returns the excess over the limits and the tokens per second without drafts."""
        rows, tokens = np.array([float(self._num_rows)]), np.array([self._num_tokens])
        excess = self._limits.excess(*self._steps.step_moments(rows, tokens))
        return float(excess[0]), float((tokens / self._steps.seconds(rows, tokens, 0.0))[0])

    def _wait_seconds(
        self, taken: npt.NDArray[np.bool_], depth_of: IntArray, place: IntArray, link_of: IntArray
    ) -> FloatArray:
        """Returns how long a step waits, in seconds, if it verifies all tokens up to each one, [limits, tokens].

        Each row is for one limit of depth: it leaves out the tokens beyond that depth.

        The slowest link determines the wait.
        """
        wait = np.zeros(taken.shape)
        for link, costs in enumerate(self._costs):
            own = np.flatnonzero(link_of == link)
            if not own.size or not costs.is_known:
                continue
            on_link = taken[:, own]
            reached = np.maximum.accumulate(np.where(on_link, depth_of[own], 0), axis=1)
            batch = np.cumsum(on_link & (place[own] == 1), axis=1)
            wait[:, own] = costs.wait_seconds(reached, batch)
        longest: FloatArray = np.maximum.accumulate(wait, axis=1)  # the step waits for the slowest link so far
        return longest


def _same_for_all(num_drafts: int, candidates: Sequence[Candidate]) -> Choice:
    depths = [min(num_drafts if c.fixed_depth is None else c.fixed_depth, c.max_depth) for c in candidates]
    if not candidates:
        return Choice([], [])
    survival = np.cumprod(own_rates([candidate.acceptance for candidate in candidates]), axis=1)
    return Choice(depths, [1.0 + float(own[:depth].sum()) for own, depth in zip(survival, depths, strict=True)])


def make_controller(config: SpeculationConfig, steps: StepTimes) -> DepthController:
    """Returns the controller that `config` names; `goodput` predicts with `steps`."""
    if config.controller == "fixed":
        return FixedController(config.num_speculative_tokens)
    return GoodputController(steps, config.draft_timeout_seconds)
