"""Depths of a target's sequences, by the controller and by what it learns from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from cluster.config_speculation import SpeculationConfig
from cluster.coordination.plan_schedule import PlanSchedule
from cluster.coordination.probing import Probing
from cluster.coordination.sequence import ActiveLink, SpeculativeSequence
from cluster.coordination.shadows import Shadows
from cluster.simulator.columns import Columns, row_of
from cluster.speculation.acceptance_model import AcceptanceColumns, PositionRates, SequenceAcceptance
from cluster.speculation.calibration import Promise
from cluster.speculation.costs import LearnedCurve
from cluster.speculation.depth import Columns as Candidates
from cluster.speculation.depth import IntArray, make_controller
from cluster.speculation.goodput import FloatArray, StepCosts
from cluster.speculation.prompts import PromptLoad, StepSeconds


class Planner:
    """What `cluster.coordination.depths.DepthPlanner` is to sequences one by one."""

    def __init__(
        self,
        config: SpeculationConfig,
        columns: Columns,
        first_row: int,
        num_rows: int,
        first_link: int,
        max_step_rows: int,
        clock: Callable[[], float],
    ) -> None:
        """Of the sequences at `num_rows` rows from `first_row` on, and of draft workers from `first_link` on."""
        self.step_seconds = LearnedCurve(max_step_rows)
        self.prompts = PromptLoad()
        self.opening_depth = config.num_speculative_tokens
        self.expected_wait = 0.0  # of a step as planned
        self.rates = PositionRates(config.max_speculative_tokens)
        self.shadows = Shadows(clock)
        self.schedule = PlanSchedule(clock)
        self._seconds = StepSeconds(self.step_seconds, self.prompts, max_step_rows)
        self._controller = make_controller(config, self._seconds)
        self.needs = self._controller.needs
        self._learns_rounds = config.controller == "threshold"
        self.probing = Probing(clock, is_wanted=self.needs.probing)
        self._config = config
        self._columns = columns
        self._first_row = first_row
        self._first_link = first_link
        self._acceptance = AcceptanceColumns(self.rates, num_rows)
        self._opening_tokens: float | None = None
        self._has_links = False

    # What `cluster.coordination.worth.Worth` asks of a planner.

    @property
    def num_planned_rows(self) -> int:
        return self.schedule.num_planned_rows

    def survival(self, model: str, temperature: float) -> FloatArray:
        return np.asarray(np.cumprod(self.rates.rates), np.float64)

    def step_costs(self, num_rows: int) -> StepCosts:
        return StepCosts(self._seconds, max(1, num_rows), self._config.draft_timeout_ms / 1e3)

    # What a target asks.

    @property
    def leaves_drafts_out(self) -> bool:
        """Whether this step is the plain one among those with drafts."""
        return self.probing.is_probing and not self.shadows

    def join(self, row: int) -> None:
        """A new sequence is at `row`."""
        self.prompts.joined()
        self._acceptance.join(np.array([row - self._first_row]))
        self._columns.depth[row] = self.opening_depth
        if self._opening_tokens is None:
            survival = np.cumprod(self.rates.rates[: self.opening_depth])
            self._columns.expected[row] = 1.0 + float(survival.sum())
        else:
            self._columns.expected[row] = self._opening_tokens
        self.schedule.joined()

    def plan(
        self,
        rows: IntArray,
        handles: Callable[[], Sequence[SpeculativeSequence]],
        links: Sequence[ActiveLink],
        best: ActiveLink | None,
        num_rows: int,
    ) -> None:
        """Sets the depths of `rows`, which are some of the `num_rows` of the next step; `handles` makes theirs. Those
        without a link are taken to be drafted for on `best`."""
        if not rows.size or (self.needs.measurements and not self.step_seconds.is_known):
            return
        if best is not None and not self._has_links:  # of a model that nothing was known of
            self._has_links = True
            self.schedule.begin_anew()
        self.schedule.planned(num_rows)
        columns = self._columns
        link = self._links_of(rows)
        if best is not None:
            link = np.where(link >= 0, link, links.index(best))
        max_depth = self._config.max_speculative_tokens
        candidates = Candidates(
            self._acceptance.own_rates(rows - self._first_row),
            np.full(len(rows), max_depth, np.int64),
            link,
            [one.costs for one in links],
        )
        choice = self._controller.choose_chains(candidates, num_rows, self.probing.min_gain)
        columns.depth[rows], columns.expected[rows] = choice.num_drafts, choice.expected_tokens
        has_drafts = bool(choice.num_drafts.any())
        self.probing.planned(has_drafts=has_drafts)
        middle = np.lexsort((choice.expected_tokens, choice.num_drafts))[len(rows) // 2]
        self.opening_depth = int(choice.num_drafts[middle])
        self._opening_tokens = float(choice.expected_tokens[middle])
        if has_drafts:
            self.shadows.dismiss_all()
        elif self.needs.probing:
            self._appoint_shadows(handles())
        self.expected_wait = self._expected_wait(rows, links)

    def _appoint_shadows(self, sequences: Sequence[SpeculativeSequence]) -> None:
        self.shadows.appoint(sequences)
        for sequence in sequences:
            if sequence.is_shadow and sequence.acceptance is None:
                own = _RowAcceptance(self._acceptance, row_of(sequence) - self._first_row)
                sequence.joined(own, self._config.window(self._config.max_speculative_tokens))

    def _links_of(self, rows: IntArray) -> IntArray:
        """Places in the target's list; -1: none."""
        return np.maximum(self._columns.link[rows] - self._first_link, -1)

    def _expected_wait(self, rows: IntArray, links: Sequence[ActiveLink]) -> float:
        depth, link = self._columns.depth[rows], self._links_of(rows)
        is_drafted = (link >= 0) & (depth > 0)
        link, depth = link[is_drafted], depth[is_drafted]
        batches = np.bincount(link, minlength=len(links))
        deepest = np.zeros(len(links), np.int64)
        np.maximum.at(deepest, link, depth)
        asked = [place for place in batches.nonzero()[0].tolist() if links[place].costs.is_known]
        return max((links[i].costs.expected_wait(int(deepest[i]), int(batches[i])) for i in asked), default=0.0)

    def promise(self, rows: IntArray) -> Promise | None:
        """What a step of `rows` is to bring by the plan; None while too little is known."""
        columns = self._columns
        is_drafted = (columns.link[rows] >= 0) & (columns.depth[rows] > 0)
        if not self.step_seconds.is_known:
            return None
        drafted = rows[is_drafted]
        if drafted.size and self.expected_wait <= 0.0:
            return None
        num_rows = len(rows) + int(columns.depth[drafted].sum())
        num_tokens = len(rows) + float(columns.expected[drafted].sum()) - len(drafted)
        wait = self.expected_wait if drafted.size else 0.0
        return Promise(bool(drafted.size), num_tokens, self.step_seconds.seconds(num_rows) + wait)

    def observe_rounds(self, rows: IntArray, num_drafts: IntArray, num_accepted: IntArray) -> None:
        """The rounds of a step that had drafts."""
        if not rows.size:
            return
        most = self.rates.max_depth  # a shadow's may be more
        num_drafts, num_accepted = np.minimum(num_drafts, most), np.minimum(num_accepted, most)
        self._acceptance.observe(rows - self._first_row, num_drafts, num_accepted)
        if self._learns_rounds:
            self._controller.observe(list(zip(num_drafts.tolist(), num_accepted.tolist(), strict=True)))


class _RowAcceptance(SequenceAcceptance):
    """That of a shadow, kept in a row."""

    def __init__(self, columns: AcceptanceColumns, row: int) -> None:
        super().__init__(columns.shared)
        self._columns = columns
        self._row = np.array([row])

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        most = self.shared.max_depth
        if num_drafts and most:
            outcome = np.array([min(num_drafts, most)]), np.array([min(num_accepted, most)])
            self._columns.observe(self._row, *outcome)
