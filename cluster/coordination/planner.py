"""Decides each sequence's depth, and keeps what the decision rests on up to date."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from cluster.config import SpeculationConfig
from cluster.coordination.link import DraftLink
from cluster.coordination.sequence import Round, SpeculativeSequence
from cluster.speculation.acceptance_model import PositionRates, SequenceAcceptance
from cluster.speculation.calibration import Calibration
from cluster.speculation.costs import LearnedCurve, LinkCosts
from cluster.speculation.depth import Candidate, GoodputController, make_controller
from cluster.speculation.drafts import is_chain
from cluster.speculation.tree import RoundTime, Shape
from cluster.speculation.tree_policy import Template, TreePolicy

_STEPS_A_PLAN = 16  # depths change slowly, and choosing them takes as long as some hundred other lines
_PLAN_SECONDS = 1.0  # where steps are slow, what a plan takes is little beside them
_SEQUENCES_A_STEP = 16  # the more sequences, the rarer: a plan's cost stays the same share of a step's
_MAX_SHADOWS = 2
_SHADOW_DEPTH = 3
_SHADOW_SHARE = 0.01  # of its draft worker's time, for which a shadow may keep it busy
_SHADOW_WEIGHT = 2  # rounds that one of a shadow stands for: so few must outweigh what was counted while all had some
_SHADOW_SECONDS = 0.25  # between two proposals for a shadow, while nothing is known of the draft's speed
_WORTH_A_SPLIT = 0.1  # of a step: a shorter wait is not worth thinking about
_HARMLESS_WAIT = 0.02  # of a step: so much later, sequences that nobody drafts for are as fast as ever
_DOUBT = 1.04  # while speculation is off it must promise so much more: estimates are not better than that
_PROBE_SECONDS = 3.0  # between two steps of the other kind: plain while speculating, with drafts while not


class DepthPlanner:
    """The controller with its inputs. Belongs to the engine's thread.

    What is never tried is never known: while speculation goes on, a step in some seconds decodes plainly, to see
    what that takes by now. While it is off, a few *shadows* are still drafted for, seldom; their proposals are
    compared with what is decoded plainly, and one of them in some seconds is verified, to see what rows cost.
    """

    def __init__(self, config: SpeculationConfig, max_rows: int, clock: Callable[[], float]) -> None:
        self.verify_seconds = LearnedCurve(max_rows)
        self._config = config
        self._clock = clock
        self._max_depth = config.max_speculative_tokens
        self.trees = TreePolicy(config.tree_width, self._max_depth, clock)
        self._controller = make_controller(
            config.controller,
            num_speculative_tokens=config.num_speculative_tokens,
            max_speculative_tokens=config.max_speculative_tokens,
            verify=self.verify_seconds,
            max_wait_seconds=config.draft_timeout_ms / 1e3,
        )
        self._is_learning = config.controller == "goodput"
        self._counts_rounds = config.controller == "threshold"
        self._rates: dict[float, PositionRates] = {}  # by temperature
        self.opening_depth = config.num_speculative_tokens  # of a new sequence
        self._opening_template: Template | None = None
        self._is_on = True  # somebody gets drafts
        self._num_steps_to_plan = 0.0
        self._plan_at = clock()
        self._num_planned_rows = 0
        self._calibration = Calibration()
        self._shadows: dict[SpeculativeSequence, float] = {}  # and when each may be drafted for again
        self._probe_at = clock() + _PROBE_SECONDS
        self.is_probing = False  # this step is of the other kind

    def open(self, sequence: SpeculativeSequence) -> None:
        """`sequence` takes part from now on."""
        if sequence.acceptance is None:
            temperature = round(4 * sequence.params.temperature) / 4
            shared = self._rates.setdefault(temperature, PositionRates(self._max_depth))
            sequence.acceptance = SequenceAcceptance(shared)
        if sequence.num_speculative_tokens is None:
            sequence.depth, sequence.template = self.opening_depth, self._opening_template
            # One among few is planned for at once, as nothing that was chosen for others is its own.
            self._num_steps_to_plan -= _STEPS_A_PLAN / max(1, self._num_planned_rows)
        else:
            sequence.depth = min(sequence.num_speculative_tokens, self._max_depth)

    def close(self, sequence: SpeculativeSequence) -> None:
        self._shadows.pop(sequence, None)
        sequence.is_shadow = False

    def begin_step(self, num_rows: int) -> bool:
        """The next step has `num_rows` sequences. Returns whether depths are due for a plan: after some steps, and when
        the load is another, as what pays for one sequence can cost a step of 64 four times its time."""
        now = self._clock()
        self.is_probing = self._is_learning and now >= self._probe_at
        self._calibration.begin_step(now)
        if self.is_probing:
            self._calibration.skip_step()
            if not self._shadows:  # with shadows it goes on until one has a proposal to verify
                self._probe_at = now + _PROBE_SECONDS
        self._num_steps_to_plan -= 1
        if self._num_steps_to_plan <= 0 or now >= self._plan_at:
            return True
        return not num_rows <= 2 * self._num_planned_rows <= 4 * num_rows

    def plan(
        self, decoding: Sequence[SpeculativeSequence], costs_of: Mapping[DraftLink, LinkCosts], num_rows: int
    ) -> None:
        """Sets the depths of `decoding`, which are some of the `num_rows` sequences of the next step."""
        if not decoding or (self._is_learning and not self.verify_seconds.is_known):
            return
        self._num_steps_to_plan = max(_STEPS_A_PLAN, num_rows // _SEQUENCES_A_STEP)
        self._plan_at = self._clock() + _PLAN_SECONDS
        self._num_planned_rows = num_rows
        any_link = next(iter(costs_of.values()), None)
        candidates = []
        for sequence in decoding:
            assert sequence.acceptance is not None
            link = any_link if sequence.link is None else costs_of[sequence.link]
            fixed = sequence.num_speculative_tokens
            candidates.append(Candidate(sequence.acceptance, self._max_depth, link, fixed))
        self._set_min_gain()
        choice = self._controller.choose(candidates, num_rows, self.trees.templates())
        depths = choice.num_drafts
        self._calibration.begin(has_drafts=any(depths), rate=choice.rate, num_rows=num_rows, now=self._clock())
        for sequence, depth in zip(decoding, depths, strict=True):
            sequence.depth = depth
            sequence.template = choice.template if sequence.num_speculative_tokens is None else None
        for sequence, tokens in zip(decoding, choice.expected_tokens, strict=False):  # none by other controllers
            sequence.expected_tokens = tokens
        chosen = [depth for s, depth in zip(decoding, depths, strict=True) if s.num_speculative_tokens is None]
        if chosen:
            self.opening_depth, self._opening_template = sorted(chosen)[len(chosen) // 2], choice.template
        self._is_on = any(depths)
        if any(depths):
            for sequence in tuple(self._shadows):
                self.close(sequence)
        elif self._is_learning:
            self._appoint_shadows(decoding)

    def asked_depth(self, sequence: SpeculativeSequence, costs: LinkCosts) -> int:
        """How many draft tokens to ask for now that `sequence` has committed; 0: leave its drafter in peace."""
        if not sequence.is_shadow or sequence.proposal is not None or self._clock() < self._shadows[sequence]:
            return sequence.useful_depth
        pause = _SHADOW_SECONDS
        if costs.is_known:
            pause = (costs.proposal_seconds(_SHADOW_DEPTH, 1) - costs.round_trip_seconds) / _SHADOW_SHARE
        self._shadows[sequence] = self._clock() + pause
        return _SHADOW_DEPTH

    def shape(self, sequence: SpeculativeSequence, num_drafts: int, costs: LinkCosts) -> Shape | None:
        """Of the tree to ask for with `num_drafts` tokens; None: a chain."""
        if not self.trees.may_branch or sequence.is_shadow:
            return None
        if sequence.num_speculative_tokens is None and self._is_learning:
            shape = () if sequence.template is None else sequence.template.parents[:num_drafts]
            return None if is_chain(shape) else shape
        return self.trees.shape(num_drafts, lambda: self._round_time(num_drafts, costs))

    def _round_time(self, num_drafts: int, costs: LinkCosts) -> RoundTime:
        """Trees of as many nodes are compared: they have as many rows, and a level's are hardly felt beside the
        weights that it reads."""
        verify = self.verify_seconds.seconds(1 + num_drafts) if self.verify_seconds.is_known else 1.0
        level = costs.proposal_seconds(1, 1) - costs.round_trip_seconds
        return RoundTime(lambda _: level, lambda _: verify, costs.round_trip_seconds)

    def verified_depth(self, sequence: SpeculativeSequence) -> int:
        """How many of the draft tokens of `sequence` that are there this step verifies."""
        if sequence.is_shadow:
            return _SHADOW_DEPTH if self.is_probing else 0
        return 0 if self.is_probing else sequence.depth

    def observe_rounds(self, rounds: Sequence[Round]) -> None:
        """A step verified and committed these, some perhaps without drafts."""
        num_tokens, has_trees = 0, self.trees.may_branch
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
            if self._is_learning:
                sequence.acceptance.observe(num_drafts, num_accepted)
            elif self._counts_rounds:
                self._controller.observe(num_drafts, num_accepted)
        self._calibration.end_step(num_tokens, self._clock())
        if self._shadows:
            self._judge_shadows(rounds)

    def _judge_shadows(self, rounds: Sequence[Round]) -> None:
        for sequence, drafts, _ in rounds:
            if sequence.is_shadow:
                if drafts.token_ids:  # the probe is done
                    self._probe_at = self._clock() + _PROBE_SECONDS
                self.judge_shadow(sequence)

    def judge_shadow(self, sequence: SpeculativeSequence) -> None:
        """Compares a shadow's proposal with the tokens committed since, as soon as they decide about all of it."""
        proposal = sequence.proposal
        if proposal is None or sequence.acceptance is None:
            return
        since = sequence.token_ids[proposal.base :]
        num_accepted = 0
        for draft, token in zip(proposal.token_ids, since, strict=False):
            if draft != token:
                break
            num_accepted += 1
        if num_accepted < min(len(since), len(proposal.token_ids)) or len(since) >= len(proposal.token_ids):
            for _ in range(_SHADOW_WEIGHT):
                sequence.acceptance.observe(len(proposal.token_ids), num_accepted)
            sequence.proposal = None

    def should_not_wait(self, num_plain: int, awaited: Sequence[SpeculativeSequence], seconds_to_wait: float) -> bool:
        """Whether the next step should be of all, with the proposals that are here, as most would wait for nothing.

        By tokens a second of all it would nearly always wait: the `num_plain` without a drafter lose a part of
        their speed, the others would lose more of theirs. But they are the many, and speculation must not slow them
        down. The proposals that come too late are of use to the step after, as far as they still fit.
        """
        if not self._is_learning or num_plain <= len(awaited) or not self.verify_seconds.is_known:
            return False
        num_rows = num_plain + sum(1 + sequence.depth for sequence in awaited)
        return seconds_to_wait > _HARMLESS_WAIT * self.verify_seconds.seconds(num_rows)

    def should_go_on_without(
        self,
        ready: Sequence[SpeculativeSequence],
        awaited: Sequence[SpeculativeSequence],
        seconds_to_wait: float,
    ) -> bool:
        """Whether the next step should be of `ready` alone, while the proposals of `awaited` are on their way.

        They then come while the target computes, and two cohorts alternate. The other choice is to wait and run all
        in one step; what decides is the tokens committed a second.
        """
        if not self._is_learning or not ready or not self.verify_seconds.is_known:
            return False
        rows_ready = sum(1 + self.verified_depth(s) for s in ready)
        rows_awaited = sum(1 + s.depth for s in awaited)
        own, both = self.verify_seconds.at(np.array([rows_ready, rows_ready + rows_awaited]))
        if seconds_to_wait < _WORTH_A_SPLIT * own:
            return False
        tokens_ready = sum(s.expected_tokens for s in ready)
        tokens = tokens_ready + sum(s.expected_tokens for s in awaited)
        return bool(tokens_ready / own > tokens / (both + seconds_to_wait))

    def observe_step(self, num_rows: int, seconds: float) -> None:
        """A step without prefill, of `num_rows` rows, took `seconds`, waiting apart."""
        self.verify_seconds.observe(num_rows, seconds)

    def skip_step(self) -> None:
        """This step does something else beside, such as prefill: to be called before its rounds are observed."""
        self._calibration.skip_step()

    def _set_min_gain(self) -> None:
        if isinstance(self._controller, GoodputController):
            doubt = 1.0 if self._is_on else _DOUBT
            self._controller.min_gain = doubt * self._calibration.handicap

    def _appoint_shadows(self, decoding: Sequence[SpeculativeSequence]) -> None:
        """Sequences that are open already come first: opening one costs its draft worker a prefill."""
        for sequence in sorted(decoding, key=lambda s: s.link is None):
            if len(self._shadows) >= _MAX_SHADOWS:
                return
            if sequence.num_speculative_tokens is None and sequence not in self._shadows:
                self._shadows[sequence] = 0.0
                sequence.is_shadow = True
