"""Runs the rounds of one target replica's sequences against the draft pool.

The engine's thread calls, once a step:

    coordinator.plan(decoding, joining)               # chooses depths, opens sequences on draft workers
    drafts = coordinator.collect(decoding)            # waits for proposals; returns the drafts to verify, by sequence
    ...                                               # the step: the sequences' token_ids grow
    coordinator.end(rounds, timing)                   # notifies the drafters at once; defers the rest

The engine calls `close` for a sequence that has ended. A sequence without drafts decodes plainly. The coordinator can
not change a token: drafts are only compared with the target's choices. An engine that schedules a step while the
previous one runs calls `plan` before that step ends, and `collect` afterwards. `begin` does both.

The code on two paths is critical, because a drafter or the target is idle while it runs:
- `end`, from the target's choices to the messages that report them to the drafters;
- the end of `collect`, from the last awaited proposal to the step's drafts.

The next `plan` does all other work, such as planning, counting, and learning from steps, while the drafters draft.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile

from cluster.config.speculation import SpeculationConfig
from cluster.coordination.balancer import LinkBalancer
from cluster.coordination.base import Link, LinkPool, LinkState
from cluster.coordination.depths import DepthPlanner
from cluster.coordination.link_value import LinkValue
from cluster.coordination.openings import Openings
from cluster.coordination.row_reservations import RowReservations
from cluster.coordination.sequence import Round, SpeculativeSequence
from cluster.coordination.speculation_gain import SpeculationGain
from cluster.coordination.stats import CoordinatorStats
from cluster.coordination.suffix_drafts import SuffixDrafts
from cluster.coordination.timeline import AnswerSpan, StepSpan, Timeline
from cluster.coordination.waiting import Waits
from cluster.engine.limits import StepLimits
from cluster.speculation.demand import DraftDemand
from cluster.speculation.drafts import NO_DRAFTS, Drafts
from cluster.telemetry.metrics import Reading
from cluster.wire.messages import SpeculateReply


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Timing of a step, from its drafts to its choices."""

    num_rows: int  # rows that yielded a token
    seconds: float
    is_pure: bool = True  # nothing else was computed in it, such as a chunk of a prompt
    num_prompts: int = 0  # prompts with a chunk in the step
    num_prompt_tokens: int = 0  # prompt tokens in these chunks
    left_prompts: bool = False  # whether prompt tokens had to wait because the step had no room
    longest_context: int = 0  # the largest number of tokens that precede a chunk


@dataclass(frozen=True, slots=True)
class _EndedStep:
    """A step that has ended; `plan` has yet to learn from its measurements."""

    rounds: Sequence[Round]
    collected: Mapping[SpeculativeSequence, Drafts]  # the drafts of each sequence
    by_suffix: Mapping[SpeculativeSequence, Drafts]  # those of the suffix index
    timing: StepTiming | None
    seconds: float  # since the end of the previous step, or since the step's own start if the engine was idle
    waited_seconds: float
    is_as_planned: bool  # all sequences continued, with their drafters' drafts and not in a plain step (`DepthPlanner`)


class Coordinator:
    """Plans and collects drafts, as the module describes. Must only be used by the engine's thread."""

    def __init__(
        self,
        pool: LinkPool,
        config: SpeculationConfig,
        vocab_size: int,
        limits: StepLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        timeout_seconds = config.draft_timeout_seconds
        self.stats = CoordinatorStats()
        self.timeline = Timeline()
        self.planner = DepthPlanner(config, limits.max_num_batched_tokens)
        self._pool = pool
        self._vocab_size = vocab_size
        self._clock = clock
        self._balancer = LinkBalancer(limits.max_num_seqs, timeout_seconds, LinkValue(self.planner), pool.trial_share)
        self._gains = SpeculationGain(self.planner, clock)
        self._openings = Openings(config, self.planner, self._balancer, self.stats, clock)
        self._waits = Waits(
            self.planner,
            self._balancer,
            self.stats,
            timeout_seconds,
            clock,
            self._take_events,
            drafts_in_turn=pool.drafts_in_turn,
        )
        self._begun: Sequence[SpeculativeSequence] = ()
        self._uncounted: Sequence[SpeculativeSequence] = ()  # sequences of a step whose depths are not in `stats` yet
        self._is_plain_step = False  # the step that the drafts were collected for
        self._began_at = 0.0
        self._waited_seconds = 0.0  # wait for proposals before this step
        self._collected: Mapping[SpeculativeSequence, Drafts] = {}  # drafts of the running step; {} between steps
        self._reservations = RowReservations(self.planner.steps, self.planner.max_depth)
        self._suffixes = SuffixDrafts(self.planner, config.suffix_bytes) if config.suffix_bytes else None
        self._by_suffix: dict[SpeculativeSequence, Drafts] = {}  # sequences of the running step with its drafts
        self._ended: list[_EndedStep] = []

    def observe_step_times(self, times: Iterable[tuple[int, float]]) -> None:
        """Learns the duration of steps that were timed at start. `times`: pairs of rows and seconds."""
        for num_rows, seconds in times:
            self.planner.steps.curve.observe(num_rows, seconds)

    def begin(
        self, decoding: Sequence[SpeculativeSequence], joining: Sequence[SpeculativeSequence] = ()
    ) -> dict[SpeculativeSequence, Drafts]:
        """Calls `plan`, then returns the result of `collect`."""
        self.plan(decoding, joining)
        return self.collect(decoding)

    def plan(self, decoding: Sequence[SpeculativeSequence], joining: Sequence[SpeculativeSequence] = ()) -> None:
        """Chooses the depths of the sequences, and opens those without a drafter on draft workers.

        The sequences in `decoding` choose a token in the next step, those in `joining` in a later one. A sequence that
        the engine preempts stays open: no step waits for its proposal, which still fits when the sequence runs again.
        """
        started_at = time.thread_time()
        self.stats.depths.update([sequence.depth for sequence in self._uncounted])
        self._uncounted = ()
        self._take_events()
        for sequence in chain(joining, decoding):
            self._openings.add(sequence)
        self._openings.rearrange()
        self._plan(decoding, joining)
        self._openings.assign()
        self._send()
        if self._suffixes is not None:
            self._suffixes.take_in([*decoding, *joining])
        self.stats.other_seconds += time.thread_time() - started_at

    def expects_drafts(self, decoding: Sequence[SpeculativeSequence]) -> bool:
        """Returns True if `collect` may return drafts for the planned step.

        If not, the step may start before the previous step's tokens are read.
        """
        return any((s.link is not None and self.planner.verified_depth(s)) or self._suffix_of(s) for s in decoding)

    def reserve(self, decoding: Sequence[SpeculativeSequence]) -> dict[SpeculativeSequence, int]:
        """Reserves rows for the drafts of `decoding` in the planned step, for engines that need the number early.

        Returns the number of rows by sequence. The step may be planned while the one before still runs.
        """
        depths, by_suffix = {}, set()
        for sequence in decoding:
            sequence.reserved(sequence.depth)
            may_come = sequence.link is not None and sequence.has_answered and not sequence.is_late
            depths[sequence] = self.planner.verified_depth(sequence) if may_come or sequence.num_ready else 0
            if found := self._suffix_of(sequence):  # the next ones are assumed to be as many
                depths[sequence] = len(found)
                sequence.reserved(len(found))
                by_suffix.add(sequence)
        planner = self.planner
        if planner.measures and planner.steps.is_known:
            # Probes, requests that set their number of drafts, and those whose limit needs the drafts get all rows, and
            # so do drafts of the suffix index.
            adjustable = {
                s: n
                for s, n in depths.items()
                if n
                and s.is_automatic
                and s is not planner.probe
                and s not in by_suffix
                and math.isinf(planner.limit_of(s))
            }
            by_drafter = {s: drafts for s, drafts in self._collected.items() if s not in self._by_suffix}
            num_other_rows = len(depths) + sum(depths.values()) - sum(adjustable.values())
            for sequence, num_rows in self._reservations.reserve(adjustable, by_drafter, num_other_rows).items():
                sequence.reserved(num_rows)
                depths[sequence] = num_rows
        return depths

    def collect(self, decoding: Sequence[SpeculativeSequence]) -> dict[SpeculativeSequence, Drafts]:
        """Returns for each sequence in `decoding` the drafts that the planned step verifies.

        Waits for proposals, at most the draft timeout for each. A sequence whose proposal is not worth the wait decodes
        plainly.
        """
        started_at, drafting_before = time.thread_time(), self._pool.drafting_seconds
        if not (decoding and self._begun):  # otherwise it began when the previous step ended
            self._began_at = self._clock()
        waited_before = self.stats.wait_seconds
        self._is_plain_step = self.planner.is_plain_step
        self._take_events()
        if not self._is_plain_step:
            self._waits.wait(decoding)
        if decoding:  # The first step of an answer never waits for a drafter, so its first token is not delayed.
            self._pool.lend_turn()
            self._take_events()
        self._waited_seconds = self.stats.wait_seconds - waited_before
        self._begun = self._uncounted = decoding
        drafts = self._collected = self._drafts(decoding)
        drafting_seconds = self._pool.drafting_seconds - drafting_before
        self.stats.critical_seconds += time.thread_time() - started_at - drafting_seconds
        return drafts

    def end(
        self,
        rounds: Sequence[Round],
        timing: StepTiming | None = None,
        joining: Sequence[SpeculativeSequence] = (),
    ) -> None:
        """Ends a step that committed `rounds`, and sends one message per link. `rounds` excludes ended sequences.

        Opens the sequences in `joining`, which take part from the next step on.
        """
        started_at, now, planner, suffixes = time.thread_time(), self._clock(), self.planner, self._suffixes
        by_suffix: dict[SpeculativeSequence, Drafts] = {}
        if suffixes is not None and rounds:
            # A step that was launched before its drafts were collected verifies none.
            verified = {ended.sequence for ended in rounds if ended.drafts}
            by_suffix = {sequence: drafts for sequence, drafts in self._by_suffix.items() if sequence in verified}
            for ended in rounds:
                if ended.sequence in by_suffix:
                    suffixes.observe(_of_drafter(ended, by_suffix))
            suffixes.propose([ended.sequence for ended in rounds])
        for ended in rounds:
            sequence = ended.sequence
            if sequence.link is not None:
                if sequence is planner.probe:
                    planner.probed(has_drafts=bool(self._collected.get(sequence)))
                num_drafts, shape = planner.wanted(sequence)
                if suffixes is not None and self._suffix_of(sequence):
                    num_drafts, shape = 0, None
                    sequence.spared()
                sequence.advance(num_drafts, shape, now)
        if joining:
            for sequence in joining:
                self._openings.add(sequence)
            self._openings.assign()
        self._send()
        if rounds or timing is not None:  # otherwise the step was empty
            is_as_planned = len(rounds) == len(self._begun) and not (self._is_plain_step or by_suffix)
            seconds, self._began_at = now - self._began_at, now
            self._ended.append(
                _EndedStep(rounds, self._collected, by_suffix, timing, seconds, self._waited_seconds, is_as_planned)
            )
            self._collected = {}
        if timing is not None:
            self.timeline.steps.add(
                StepSpan(
                    now, self._waited_seconds, timing.seconds, len(self._begun), timing.num_rows, timing.num_prompts > 0
                )
            )
        self.stats.critical_seconds += time.thread_time() - started_at

    def close(self, sequence: SpeculativeSequence) -> None:
        """Removes `sequence`, which has ended. The next message to its drafter reports this."""
        self._openings.remove(sequence)
        if self._suffixes is not None:
            self._suffixes.close(sequence)

    def demand(self) -> DraftDemand | None:
        """Returns the predicted gain of drafts; None if unknown. Thread-safe."""
        return self._gains.demand()

    def readings(self) -> Iterator[Reading]:
        """Any thread."""
        yield from self.stats.readings()
        yield from self._balancer.readings()
        yield from self._gains.readings()
        if self._suffixes is not None:
            yield from self._suffixes.readings()

    def _learn(self) -> None:
        """Learns from the steps that ended since the last plan, and from the replies of their drafters."""
        ended, self._ended = self._ended, []
        planner = self.planner
        for link in self._balancer.active.values():
            link.learn()
        for step in ended:
            by_drafter = [ended for ended in step.rounds if ended.sequence not in step.by_suffix]
            planner.observe([_of_drafter(ended, step.collected) for ended in by_drafter])
            timing = step.timing
            if timing is None:
                continue
            num_committed = sum([len(ended.chosen) for ended in step.rounds])
            if step.is_as_planned and step.rounds and timing.is_pure:
                planner.observe_speed(step.rounds, step.seconds)
            # Includes the work between two steps: drafts save steps, and so this work too.
            seconds = max(timing.seconds, step.seconds - step.waited_seconds)
            planner.steps.observe_rows(timing.num_rows, timing.num_prompt_tokens, timing.longest_context, seconds)
            planner.steps.observe_prompts(timing.num_prompt_tokens, num_committed, left_some=timing.left_prompts)

    def _plan(self, decoding: Sequence[SpeculativeSequence], joining: Sequence[SpeculativeSequence]) -> None:
        num_rows = len(decoding) + len(joining)
        if self.planner.begin_step(num_rows):
            self._learn()
            now = self._clock()
            planned: list[SpeculativeSequence] = []
            others: list[SpeculativeSequence] = []
            for sequence in chain(decoding, joining):
                (planned if self._openings.may_be_drafted_for(sequence, now) else others).append(sequence)
            best = self._balancer.best(planned[0].params.temperature, now) if planned else None
            self.planner.plan(planned, best, num_rows, others)
            num_draftable = sum(map(self._openings.would_be_drafted_for, decoding))
            self._gains.planned(planned, self._balancer.active.values(), num_rows, num_draftable)

    def _send(self) -> None:
        for link in self._balancer.active.values():
            link.send()

    def _drafts(self, sequences: Sequence[SpeculativeSequence]) -> dict[SpeculativeSequence, Drafts]:
        drafts: dict[SpeculativeSequence, Drafts] = {}
        self._by_suffix = {}
        for sequence in sequences:
            if self._suffixes is not None and (found := self._suffix_of(sequence).first(sequence.num_rows)):
                self._by_suffix[sequence] = found
            else:
                found = sequence.drafts(self.planner.verified_depth(sequence))
            drafts[sequence] = found
            if not found.token_ids:
                self.stats.plain_decodes[self._why_plain(sequence)] += 1
        if max(chain.from_iterable([found.token_ids for found in drafts.values()]), default=0) >= self._vocab_size:
            return {sequence: self._valid(found) for sequence, found in drafts.items()}
        return drafts

    def _suffix_of(self, sequence: SpeculativeSequence) -> Drafts:
        """Returns the suffix index's drafts if the next step of `sequence` should verify them; otherwise none."""
        if self._suffixes is None or sequence is self.planner.probe or self.planner.is_plain_step:
            return NO_DRAFTS
        return self._suffixes.drafts_of(sequence)

    def _why_plain(self, sequence: SpeculativeSequence) -> str:
        if sequence.num_speculative_tokens == 0:
            return "asked"
        if self.planner.is_plain_step:
            return "probe"
        if sequence.depth == 0:
            return "does_not_pay"
        if sequence.link is None:
            return "refused" if sequence.num_refusals else "no_draft_worker"
        return "late" if sequence.is_late else "no_fitting_draft"

    def _valid(self, drafts: Drafts) -> Drafts:
        valid = drafts.below(self._vocab_size)
        self.stats.num_invalid_token_ids += len(drafts) - len(valid)
        if drafts and not valid:
            self.stats.plain_decodes["no_fitting_draft"] += 1
        return valid

    def _take_events(self, timeout: float = 0.0) -> None:
        for happened in self._pool.poll(timeout):
            if isinstance(happened.event, SpeculateReply):
                self._take_reply(happened.link, happened.event, happened.answer_seconds)
            elif happened.event is LinkState.UP:
                self.planner.replaces(happened.link.model, self._balancer.add(happened.link))
            else:
                link = self._balancer.remove(happened.link)
                if link is not None:
                    self._openings.lose(link)

    def _take_reply(self, draft_link: Link, reply: SpeculateReply, answer_seconds: float) -> None:
        link = self._balancer.active.get(draft_link)
        if link is None:
            return
        link.heard(reply, answer_seconds)
        num_owed = sum([one.is_whole and one.start == 0 for one in reply.proposals.values()])
        if reply.timing is not None and num_owed:
            held_seconds, step_seconds, batch = reply.timing.held_seconds, reply.timing.step_seconds, reply.timing.batch
            self.timeline.answers.add(
                AnswerSpan(
                    self._clock(),
                    max(answer_seconds, held_seconds),  # a reply that crossed a message counts from that message
                    held_seconds,
                    step_seconds,
                    batch,
                    num_owed,
                    draft_link.address,
                )
            )
        now, sequences = self._clock(), link.sequences
        for wire_id, proposal in reply.proposals.items():
            sequence = sequences.get(wire_id)
            if sequence is not None:  # None: it was closed in the meantime
                sequence.answered(proposal, now, self.stats)
        if reply.lost or reply.refused:
            self._openings.turn_away(link, reply)


def _of_drafter(ended: Round, collected: Mapping[SpeculativeSequence, Drafts]) -> Round:
    """Returns `ended` without the drafts that a grammar added, because they do not measure the drafter."""
    proposed, verified = collected.get(ended.sequence), ended.drafts
    if proposed is None or verified is proposed or proposed.parents is not None:
        return ended  # a grammar adds no nodes to a tree
    pairs = zip(verified.token_ids, proposed.token_ids, strict=False)
    num_proposed = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return ended._replace(drafts=verified.first(num_proposed))
