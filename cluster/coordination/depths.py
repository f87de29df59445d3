"""Decides each sequence's depth, and keeps what the decision rests on up to date."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from cluster.config_speculation import SpeculationConfig
from cluster.coordination.plan_schedule import PlanSchedule
from cluster.coordination.probing import Probing
from cluster.coordination.sequence import ActiveLink, Round, SpeculativeSequence
from cluster.coordination.shadows import SHADOW_DEPTH, Shadows
from cluster.speculation.acceptance_model import PositionRates, SequenceAcceptance
from cluster.speculation.calibration import Promise
from cluster.speculation.costs import LearnedCurve
from cluster.speculation.depth import Candidate, NextStep, make_controller
from cluster.speculation.drafts import is_chain
from cluster.speculation.goodput import FloatArray, StepCosts
from cluster.speculation.prompts import PromptLoad, StepSeconds
from cluster.speculation.tree import RoundTime, Shape, num_levels
from cluster.speculation.tree_policy import Template, TreePolicy


class DepthPlanner:
    """The controller with its inputs. Belongs to the engine's thread."""

    def __init__(self, config: SpeculationConfig, max_rows: int, clock: Callable[[], float]) -> None:
        self.step_seconds = LearnedCurve(max_rows)  # of the target, over the rows of the step
        self.prompts = PromptLoad()
        self._seconds = StepSeconds(self.step_seconds, self.prompts, max_rows)
        self.trees = TreePolicy(config.tree_width, config.max_speculative_tokens, clock)
        self.opening_depth = config.num_speculative_tokens  # of a new sequence
        self._opening_template: Template | None = None
        self._opening_tokens: float | None = (
            None  # that its rounds are expected to commit; None: nothing was planned yet
        )
        self._config = config
        self._clock = clock
        self._max_depth = config.max_speculative_tokens
        self._controller = make_controller(config, self._seconds)
        self.needs = self._controller.needs
        self.shadows = Shadows(clock)
        self.probing = Probing(clock, is_wanted=self.needs.probing)
        self._rates: dict[tuple[str, float], PositionRates] = {}  # by draft model and temperature
        self._schedule = PlanSchedule(clock)

    def join(self, sequence: SpeculativeSequence) -> None:
        """`sequence` takes part from now on."""
        self.prompts.joined()
        asked = sequence.num_speculative_tokens
        acceptance = SequenceAcceptance(self.rates("", sequence.params.temperature))
        sequence.joined(acceptance, self._config.window(asked or self._max_depth))
        if asked is None:
            expected = self._opening_tokens or 1.0 + sum(acceptance.survival()[: self.opening_depth])
            sequence.planned(self.opening_depth, self._opening_template, expected)
            self._schedule.joined()
        else:
            depth = min(asked, self._max_depth)
            sequence.planned(depth, None, 1.0 + sum(acceptance.survival()[:depth]))

    def rates(self, model: str, temperature: float) -> PositionRates:
        """How often drafts of `model` are accepted at such a temperature, as learned from all sequences."""
        kind = model, round(4 * temperature) / 4
        known = self._rates.get(kind)
        if known is None:
            known = self._rates[kind] = PositionRates(self._max_depth)
            self._schedule.begin_anew()
        return known

    def survival(self, model: str, temperature: float) -> FloatArray:
        """How likely a draft of `model` at depth 1, 2, ... is committed."""
        return np.asarray(np.cumprod(self.rates(model, temperature).rates), np.float64)

    def drafted_by(self, sequence: SpeculativeSequence, model: str) -> None:
        """`sequence`, which has joined, is or would be drafted for by `model`: another model begins anew with it."""
        shared = self.rates(model, sequence.params.temperature)
        assert sequence.acceptance is not None
        if sequence.acceptance.shared is not shared:
            sequence.acceptance.take_in()
            sequence.drafted_by(SequenceAcceptance(shared))

    def step_costs(self, num_rows: int) -> StepCosts:
        return StepCosts(self._seconds, max(1, num_rows), self._config.draft_timeout_ms / 1e3)

    @property
    def num_planned_rows(self) -> int:
        """Sequences of the step that was last planned for."""
        return self._schedule.num_planned_rows

    def leave(self, sequence: SpeculativeSequence) -> None:
        if sequence.acceptance is not None:  # one that never joined makes no room
            self.prompts.ended()
        self.shadows.dismiss(sequence)

    def begin_step(self, num_rows: int) -> bool:
        """The next step has `num_rows` sequences. Returns whether depths are due for a plan."""
        self.probing.begin_step(awaits_shadow=bool(self.shadows))
        return self._schedule.is_due(num_rows)

    def plan(self, decoding: Sequence[SpeculativeSequence], best: ActiveLink | None, num_rows: int) -> None:
        """Sets the depths of `decoding`, which are some of the `num_rows` sequences of the next step.

        Those that have no link yet are taken to be drafted for on `best`; None: no link is up.
        """
        if not decoding or (self.needs.measurements and not self.step_seconds.is_known):
            return
        self._schedule.planned(num_rows)
        candidates = []
        for sequence in decoding:
            link = sequence.link or best
            if link is not None:
                self.drafted_by(sequence, link.model)
            assert sequence.acceptance is not None
            costs = None if link is None else link.costs
            candidates.append(Candidate(sequence.acceptance, self._max_depth, costs, sequence.num_speculative_tokens))
        step = NextStep(candidates, num_rows, self.trees.templates(), self.probing.min_gain)
        choice = self._controller.choose(step)
        has_drafts = any(choice.num_drafts)
        self.probing.planned(has_drafts=has_drafts)
        chosen = []
        for sequence, depth, tokens in zip(decoding, choice.num_drafts, choice.expected_tokens, strict=True):
            is_free = sequence.num_speculative_tokens is None
            sequence.planned(depth, choice.template if is_free else None, tokens)
            if is_free:
                chosen.append((depth, tokens))
        if chosen:
            self.opening_depth, self._opening_tokens = sorted(chosen)[len(chosen) // 2]
            self._opening_template = choice.template
        if has_drafts:
            self.shadows.dismiss_all()
        elif self.needs.probing:
            self.shadows.appoint(decoding)

    def wanted(self, sequence: SpeculativeSequence, now: float) -> tuple[int, Shape | None]:
        """How many draft tokens to ask for now, 0 to leave the drafter in peace, and of which tree; None: a chain."""
        if sequence.is_shadow:
            return self.shadows.wanted(sequence, now), None
        depth = sequence.depth
        if depth >= sequence.max_len - len(sequence.token_ids):
            depth = sequence.useful_depth
        is_free = sequence.num_speculative_tokens is None and self.needs.measurements
        if is_free and sequence.link is not None and not sequence.link.has_proposed:
            depth = min(depth, 1)  # says what drafts cost, and costs least where they are dear
        return depth, self.shape(sequence, depth) if self.trees.may_branch else None

    def shape(self, sequence: SpeculativeSequence, num_drafts: int) -> Shape | None:
        """Of the tree to ask for with `num_drafts` tokens; None: a chain."""
        if sequence.num_speculative_tokens is None and self.needs.measurements:
            shape = () if sequence.template is None else sequence.template.parents[:num_drafts]
            return None if is_chain(shape) else shape
        return self.trees.shape(num_drafts, lambda: self._round_time(sequence, num_drafts))

    def planned_levels(self, sequence: SpeculativeSequence) -> int:
        """How many draft tokens in a row the round of `sequence` has by the plan."""
        shape = None if sequence.template is None else sequence.template.parents[: sequence.depth]
        return sequence.depth if shape is None else num_levels(shape, sequence.depth)

    def _round_time(self, sequence: SpeculativeSequence, num_drafts: int) -> RoundTime:
        """Trees of as many nodes are compared: they have as many rows, and a level's are hardly felt beside the
        weights that it reads."""
        assert sequence.link is not None
        costs = sequence.link.costs
        verify = self.step_seconds.seconds(1 + num_drafts) if self.step_seconds.is_known else 1.0
        level = costs.proposal_seconds(2, 1) - costs.proposal_seconds(1, 1)
        return RoundTime(lambda _: level, lambda _: verify, costs.round_trip_seconds)

    @property
    def leaves_drafts_out(self) -> bool:
        """Whether this step is the plain one among those with drafts."""
        return self.probing.is_probing and not self.shadows

    @property
    def verifies_shadows(self) -> bool:
        """Whether this step is, or may be, the one with drafts among plain ones."""
        return self.probing.is_probing and bool(self.shadows)

    def verified_depth(self, sequence: SpeculativeSequence) -> int:
        """How many of the draft tokens of `sequence` that are there this step verifies."""
        if sequence.is_shadow:
            return SHADOW_DEPTH if self.probing.is_probing else 0
        return 0 if self.leaves_drafts_out else sequence.depth

    def observe_rounds(self, rounds: Sequence[Round], ended_at: float, *, is_pure: bool, is_whole: bool) -> None:
        """A step verified and committed these, some perhaps without drafts; `is_pure` without a prefill beside,
        `is_whole` when they are all that it had."""
        # A probe is none of what was planned; one that waits for a shadow's drafts has not come to it yet.
        is_probe = self.leaves_drafts_out or any(r.sequence.is_shadow and r.drafts.token_ids for r in rounds)
        is_as_planned = rounds and is_pure and is_whole and not is_probe and self.needs.measurements
        promise = self._promise(rounds) if is_as_planned else None
        num_tokens, has_trees = 0, self.trees.may_branch
        outcomes = []
        for sequence, drafts, chosen in rounds:
            num_tokens += len(chosen)
            if not drafts.token_ids or sequence.acceptance is None:
                continue
            if has_trees:
                self.trees.count(drafts, chosen)
            if drafts.parents is None:
                num_drafts, num_accepted = len(drafts.token_ids), len(chosen) - 1
            else:
                num_drafts, num_accepted = drafts.main_path_outcome(chosen)
            sequence.acceptance.observe(num_drafts, num_accepted)
            outcomes.append((num_drafts, num_accepted))
        self._controller.observe(outcomes)
        self.probing.end_step(promise, num_tokens, ended_at)
        if self.shadows and self.shadows.judge(rounds):
            self.probing.done()

    def _promise(self, rounds: Sequence[Round]) -> Promise | None:
        """What a step of the sequences of `rounds` is to bring by the plan; None while too little is known."""
        drafted = [r.sequence for r in rounds if r.sequence.link is not None and r.sequence.depth > 0]
        if not self.step_seconds.is_known or not all(s.link is not None and s.link.costs.is_known for s in drafted):
            return None
        num_rows = len(rounds) + sum(sequence.depth for sequence in drafted)
        num_tokens = len(rounds) + sum(sequence.expected_tokens - 1.0 for sequence in drafted)
        seconds = self.step_seconds.seconds(num_rows) + self.expected_wait(drafted)
        return Promise(bool(drafted), num_tokens, seconds)

    def expected_wait(self, drafted: Sequence[SpeculativeSequence]) -> float:
        """Seconds for which a step waits for the proposals of `drafted`, which have links, by the plan."""
        links: dict[ActiveLink, tuple[int, int]] = {}  # depth and batch
        for sequence in drafted:
            assert sequence.link is not None
            depth, batch = links.get(sequence.link, (0, 0))
            links[sequence.link] = max(depth, self.planned_levels(sequence)), batch + 1
        return max((link.costs.expected_wait(*asked) for link, asked in links.items()), default=0.0)
