"""Decides each sequence's depth, and updates the measurements that the decision needs."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from cluster.config.speculation import SpeculationConfig
from cluster.coordination.sequence import ActiveLink, Round, SpeculativeSequence
from cluster.speculation.acceptance_model import FloatArray, PositionRates, SequenceAcceptance, kind_of
from cluster.speculation.depth import Candidate, NextStep, make_controller
from cluster.speculation.drafts import is_chain
from cluster.speculation.realised_gain import RealisedGain
from cluster.speculation.speed import Speed, tokens_per_round
from cluster.speculation.step_times import StepTimes
from cluster.speculation.tree import RoundTime, Shape
from cluster.speculation.tree_policy import Template, TreePolicy
from cluster.speculation.tuning import LIMIT_TOKENS, PLAN_STEPS, PRIOR, RECENT, TRIAL_COST, WINDOW, has_load_changed


class DepthPlanner:
    """The depth controller with its inputs. Must only be used by the engine's thread.

    Steps with drafts and steps without drafts must both stay measured. While sequences have drafts, an occasional step
    leaves them out: a *plain step* (`is_plain_step`). While no sequence has drafts, one sequence occasionally gets a
    short round with drafts: a *probe*.
    """

    def __init__(self, config: SpeculationConfig, max_rows: int) -> None:
        self.steps = StepTimes(max_rows)
        self.trees = TreePolicy(config.tree_width, config.max_speculative_tokens)
        self.realised = RealisedGain()
        self.initial_depth = config.num_speculative_tokens  # depth of a new sequence before a plan
        self.num_planned_rows = 0  # number of sequences in the step of the last plan
        self.has_drafts = True  # whether the last plan gave any sequence drafts
        self.is_plain_step = False  # the current step leaves drafts out
        self.spare_seconds = math.inf  # time that prompts may add to a step within the limits, by the last plan
        self.leaves_prompts_waiting = False  # whether the last plan's steps cannot compute the prompts that they cause
        self.probe: SpeculativeSequence | None = None
        self._opening_template: Template | None = None
        # Depth and expected tokens per round of a new sequence, by its limit, ascending; empty before a plan.
        self._openings: dict[float, tuple[int, float]] = {}
        self._predicted = 0.0  # tokens per second of one sequence that the last plan predicts; 0: no prediction
        self._config = config
        self.max_depth = config.max_speculative_tokens
        self.runs_ahead = config.granted_window > 0  # whether drafters draft beyond the proposals they owe
        self._controller = make_controller(config, self.steps)
        self.measures = self._controller.measures
        self._rates: dict[tuple[str, float], PositionRates] = {}  # rates by draft model and temperature
        self._replaced: dict[str, str] = {}  # by draft model: the one that it replaced on a worker
        self._num_plans = 0  # plans since a draft model or a temperature appeared for the first time
        self._steps_to_plan = 0.0
        self._steps_to_plain, self._steps_to_probe = WINDOW, 0
        self._num_probes = 0
        self._inverse_tokens = 1.0 / LIMIT_TOKENS  # mean of 1 / tokens of answers with a limit
        self._num_lengths = PRIOR  # answers in that mean, at most `WINDOW`

    # Sequences.

    def join(self, sequence: SpeculativeSequence) -> None:
        """Registers `sequence` for drafting, and gives it a depth until the next plan."""
        self.steps.joined()
        asked = sequence.num_speculative_tokens
        acceptance = SequenceAcceptance(self.rates("", sequence.params.temperature))
        sequence.joined(acceptance, self._config.window(asked or self.max_depth))
        if asked is None:
            if self._openings:
                limits = list(self._openings)
                place = max(0, bisect_right(limits, self.limit_of(sequence)) - 1)
                depth, expected = self._openings[limits[place]]
            else:
                depth = self.initial_depth
                expected = tokens_per_round(acceptance.survival()[:depth])
            sequence.planned(depth, self._opening_template, expected)
            # The fewer sequences the last plan had, the less it fits with a new one: the next plan comes sooner.
            self._steps_to_plan -= PLAN_STEPS / max(1, self.num_planned_rows)
        else:
            depth = min(asked, self.max_depth)
            sequence.planned(depth, None, tokens_per_round(acceptance.survival()[:depth]))

    def limit_of(self, sequence: SpeculativeSequence) -> float:
        """Returns the limit of mean seconds per output token of `sequence`; infinite without a limit."""
        return self._config.output_limit if sequence.output_limit is None else sequence.output_limit

    def leave(self, sequence: SpeculativeSequence) -> None:
        num_tokens = len(sequence.token_ids) - sequence.num_prompt_tokens
        if num_tokens >= LIMIT_TOKENS and math.isfinite(self.limit_of(sequence)):
            self._num_lengths = min(self._num_lengths + 1.0, WINDOW)
            self._inverse_tokens += (1.0 / (num_tokens - 1) - self._inverse_tokens) / self._num_lengths
        if sequence.acceptance is not None:  # a sequence that never joined was not counted in `steps`
            self.steps.ended()
            # Rounds since the last plan are ignored. Well-drafted answers end within a few deep rounds, so these
            # rounds would make deep drafts look better than they are for other sequences. Learning from them made
            # recorded answers at T = 0 slower by 1, 3 and 1 % with 1, 4 and 16 streams.
            # While there are few measurements, the rounds count: very short answers provide no others.
            if sequence.acceptance.shared.num_tests > PRIOR + RECENT:
                sequence.left()
        if sequence is self.probe:
            self.probe = None

    def rates(self, model: str, temperature: float) -> PositionRates:
        """Returns the acceptance rates of the drafts of `model` at about this temperature, shared by all sequences."""
        kind = model, kind_of(temperature)
        if kind not in self._rates:
            replaced = self._rates.get((self._replaced.get(model, ""), kind[1]))
            self._rates[kind] = PositionRates(self.max_depth) if replaced is None else replaced.successor()
            self._num_plans = 0
        return self._rates[kind]

    def most_tests(self, model: str) -> float:
        """Returns the tests of the best known temperature of `model`, as `PositionRates.num_tests`."""
        return max((rates.num_tests for (name, _), rates in self._rates.items() if name == model), default=0.0)

    def replaces(self, model: str, replaced: str) -> None:
        """Makes `model` begin with the rates of `replaced`, the model that its worker had before."""
        if replaced != model:
            self._replaced.setdefault(model, replaced)

    def survival(self, model: str, temperature: float) -> FloatArray:
        """Returns, for depths 1, 2, ..., the probability that a draft of `model` at that depth is committed."""
        return np.asarray(np.cumprod(self.rates(model, temperature).rates), np.float64)

    def drafted_by(self, sequence: SpeculativeSequence, model: str) -> None:
        """Sets the model that drafts, or would draft, for `sequence`. The sequence must have joined.

        Resets the sequence's acceptance if the model is a different one.
        """
        shared = self.rates(model, sequence.params.temperature)
        assert sequence.acceptance is not None
        if sequence.acceptance.shared is not shared:
            sequence.drafted_by(SequenceAcceptance(shared))

    def speed(self, num_rows: int) -> Speed:
        """Returns the predicted speed of `num_rows` sequences that all have the same depth."""
        return Speed(self.steps, max(1, num_rows), self._config.draft_timeout_seconds)

    # Plans.

    def begin_step(self, num_rows: int) -> bool:
        """Begins a step with `num_rows` sequences. Returns True if depths must be planned."""
        self._steps_to_probe -= 1
        if self.has_drafts:
            self._steps_to_plain -= 1
        self.is_plain_step = self.measures and self.has_drafts and self._steps_to_plain <= 0
        if self.is_plain_step:
            self._steps_to_plain = WINDOW
        self._steps_to_plan -= 1
        return self._steps_to_plan <= 0 or has_load_changed(num_rows, self.num_planned_rows)

    def plan(
        self,
        decoding: Sequence[SpeculativeSequence],
        best: ActiveLink | None,
        num_rows: int,
        others: Sequence[SpeculativeSequence] = (),
    ) -> None:
        """Sets the depths of the sequences in `decoding`. The next step has `num_rows` sequences, these included.

        `others`: sequences of the step that cannot get drafts, which only have limits.

        Assumes that sequences without a link will get the link `best`; None: no link is up.
        """
        if not decoding or (self.measures and not self.steps.is_known):
            self._predicted = 0.0
            return
        # The first rounds change the measurements most, so the first plans follow each other after few steps.
        self._num_plans += 1
        self._steps_to_plan, self.num_planned_rows = min(PLAN_STEPS, self._num_plans), num_rows
        candidates = []
        for sequence in decoding:
            link = sequence.link or best
            if link is not None:
                self.drafted_by(sequence, link.model)
            assert sequence.acceptance is not None
            costs, asked = None if link is None else link.costs, sequence.num_speculative_tokens
            candidates.append(Candidate(sequence.acceptance, self.max_depth, costs, asked, self.limit_of(sequence)))
        step = NextStep(
            candidates,
            num_rows,
            self.trees.templates(),
            1.0 / self.realised.share,
            list(map(self.limit_of, others)),
            1.0 / self._inverse_tokens,
        )
        choice = self._controller.choose(step)
        chosen = defaultdict(list)
        for sequence, depth, tokens in zip(decoding, choice.num_drafts, choice.expected_tokens, strict=True):
            is_free = sequence.is_automatic
            sequence.planned(depth, choice.template if is_free else None, tokens)
            if is_free:
                chosen[self.limit_of(sequence)].append((depth, tokens))
        if chosen:
            self._openings = {limit: sorted(own)[len(own) // 2] for limit, own in sorted(chosen.items())}
            self._opening_template = choice.template
        self.has_drafts = any(choice.num_drafts)
        self.spare_seconds = choice.spare_seconds
        num_tokens = sum(choice.expected_tokens) + num_rows - len(decoding)
        self.leaves_prompts_waiting = self.steps.leave_prompts_waiting(num_tokens)
        has_links = any(candidate.costs is not None for candidate in candidates)
        self._predicted = choice.tokens_per_second / num_rows if has_links else 0.0
        if self.has_drafts:
            self.probe = None
        else:
            self._begin_probe(decoding)

    # Probes.

    def _begin_probe(self, decoding: Sequence[SpeculativeSequence]) -> None:
        """Begins a probe if one is due, or plans the current probe again if its round is not over."""
        if self.probe is not None and self.probe.link is None:
            self.probe = None  # no draft worker had room since the last plan: try another sequence
        if self.probe is None and self.measures and self._steps_to_probe <= 0:
            free = [sequence for sequence in decoding if sequence.is_automatic]
            if free:
                self.probe = free[self._num_probes % len(free)]
                self._num_probes += 1
        if self.probe is not None:
            self.probe.planned(min(1, self.max_depth), None)
            assert self.probe.acceptance is not None
            self.probe.acceptance.shared.remember(PRIOR + RECENT)  # older results are out of date

    def probed(self, *, has_drafts: bool) -> None:
        """Records a round of the probe's sequence. Ends the probe unless the sequence's first proposal is missing."""
        sequence = self.probe
        assert sequence is not None
        if not (has_drafts or (sequence.is_late and sequence.has_answered)):
            return
        sequence.planned(0, None)
        self.probe = None
        self.realised.forget()
        plain = self.steps.curve.seconds(self.num_planned_rows)
        more_rows = self.steps.curve.seconds(self.num_planned_rows + 1) - plain
        wait = plain
        if sequence.link is not None and sequence.link.costs.is_known:
            wait = min(sequence.link.costs.proposal_seconds(1, 1), self._config.draft_timeout_seconds)
        self._steps_to_probe = int((more_rows + wait) / plain / TRIAL_COST)

    # Rounds.

    def wanted(self, sequence: SpeculativeSequence) -> tuple[int, Shape | None]:
        """Returns the number of draft tokens to request now, 0 for none, and the shape of their tree; None: a chain."""
        depth = sequence.depth
        if depth >= sequence.max_len - len(sequence.token_ids):
            depth = sequence.useful_depth
        link = sequence.link
        if link is not None and not link.has_proposed and self.measures and sequence.is_automatic:
            depth = min(depth, 1)  # one draft measures the cost of drafts, and costs least if drafts are expensive
        return depth, self.shape(sequence, depth) if self.trees.may_branch else None

    def shape(self, sequence: SpeculativeSequence, num_drafts: int) -> Shape | None:
        """Returns the shape of the tree to request with `num_drafts` tokens; None: a chain."""
        if sequence.is_automatic and self.measures:
            shape = () if sequence.template is None else sequence.template.parents[:num_drafts]
            return None if is_chain(shape) else shape
        return self.trees.shape(num_drafts, lambda: self._round_time(sequence, num_drafts))

    def _round_time(self, sequence: SpeculativeSequence, num_drafts: int) -> RoundTime:
        """Returns the round time for comparing trees of `num_drafts` nodes.

        All these trees have the same number of rows to verify. The drafter's time for a level is assumed to be the same
        for any number of nodes, because most of it is spent reading the weights.
        """
        assert sequence.link is not None
        costs = sequence.link.costs
        verify = self.steps.curve.seconds(1 + num_drafts) if self.steps.is_known else 1.0
        level = costs.proposal_seconds(2, 1) - costs.proposal_seconds(1, 1)
        return RoundTime(lambda _: level, lambda _: verify, costs.round_trip_seconds)

    def verified_depth(self, sequence: SpeculativeSequence) -> int:
        """Returns the maximum number of draft tokens of `sequence` that this step verifies."""
        return 0 if self.is_plain_step else min(sequence.depth, sequence.num_rows)

    # Learning.

    def observe(self, rounds: Sequence[Round]) -> None:
        """Learns acceptance from the rounds of a step; some may have no drafts."""
        outcomes, has_trees = [], self.trees.may_branch
        for sequence, drafts, chosen in rounds:
            if not drafts.token_ids or sequence.acceptance is None:
                continue
            if has_trees:
                self.trees.count(drafts, chosen)
            if drafts.parents is None:
                num_drafts = len(drafts.token_ids)
                num_accepted = min(num_drafts, len(chosen) - 1)
            else:
                num_drafts, num_accepted = drafts.main_path_outcome(chosen)
            sequence.acceptance.observe(num_drafts, num_accepted)
            outcomes.append((num_drafts, num_accepted))
        self._controller.observe(outcomes)

    def observe_speed(self, rounds: Sequence[Round], seconds: float) -> None:
        """Learns from a step that went as planned. `seconds`: its duration, including the wait for proposals.

        The step must not have computed prompts.
        """
        if not (self.has_drafts and self.steps.is_known):
            return
        num_tokens = sum([len(ended.chosen) for ended in rounds])
        per_sequence = seconds * len(rounds)
        self.realised.observe_gain(num_tokens / per_sequence * self.steps.curve.seconds(len(rounds)))
        if self._predicted > 0.0:
            expected = len(rounds) + sum(
                [(s.expected_tokens - 1.0) * len(drafts) / s.depth for s, drafts, _ in rounds if s.depth]
            )
            self.realised.observe_share(expected / per_sequence / self._predicted)
