"""The rounds of a target's sequences: what `cluster.coordination.coordinator` does for them one by one.

A step, event by event:

    begin, begin_wait    learns from the last step, plans, opens sequences, and begins to wait for proposals
    wake                 looks whether the wait is over
    drafts               what is verified
    end, tell, assign    takes down what came of it, tells the drafters, opens what has joined
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cluster.config import Config
from cluster.coordination.balancer import LinkBalancer
from cluster.coordination.openings import pause_seconds
from cluster.coordination.sequence import Round, SpeculativeSequence
from cluster.coordination.shadows import SHADOW_DEPTH
from cluster.coordination.stats import CoordinatorStats
from cluster.simulator.columns import NEVER, BoolArray, Columns, row_of
from cluster.simulator.planner import Planner
from cluster.simulator.waiting import Waits
from cluster.simulator.worths import Worths
from cluster.speculation.costs import DraftStep
from cluster.speculation.depth import IntArray
from cluster.speculation.drafts import Drafts
from cluster.speculation.goodput import FloatArray
from cluster.speculation.prompts import learn_step
from cluster.wire.messages import Proposal

_NONE = np.zeros(0, np.int64)
_MAX_REPLIES = 16  # of a link that are learned from, a plan
_TEMPERATURE = 1.0  # of all requests


@dataclass(eq=False, slots=True)
class Link:
    """To a draft worker."""

    index: int  # of the worker
    way_seconds: float
    model: str = "simulated"
    expected_round_trip: float | None = None
    address: str = ""  # nothing is dialled

    def send(self, request: object) -> None:
        """Messages are columns: nothing is handed over."""


@dataclass(slots=True)
class Ended:
    """What is learned from a step, at the beginning of the next."""

    rows: IntArray  # of sequences that go on
    num_drafts: IntArray
    num_accepted: IntArray
    num_committed: int
    num_choices: int
    prompts: int
    prompt_tokens: int
    left_prompts: bool
    longest_context: int
    seconds: float
    is_whole: bool
    ended_at: float


class Rounds:
    def __init__(
        self,
        config: Config,
        columns: Columns,
        rows: range,
        links: Sequence[Link],
        first_link: int,
        clock: Callable[[], float],
        told: Callable[[int, float, bool], None],
    ) -> None:
        """Of the sequences at `rows` of `columns`; `links` are to the draft workers that they may use, from number
        `first_link` on; `told` is called when a message goes to one, with when it arrives and whether its sequences
        change."""
        self.stats = CoordinatorStats()
        self.planner = Planner(
            config.speculation,
            columns,
            rows.start,
            len(rows),
            first_link,
            config.target.max_num_batched_tokens,
            clock,
        )
        self._columns = columns
        self._told = told
        timeout = config.speculation.draft_timeout_ms / 1e3
        self._worths = Worths(self.planner)
        self._balancer = LinkBalancer(config.target.max_num_seqs, timeout, self._worths, config.placement.trial_share)
        for link in links:
            self._balancer.add(link)
        self.links = list(self._balancer.active.values())
        self._first_link = first_link
        self._ways = np.array([link.way_seconds for link in links])
        self._order = _NONE
        self._has_proposed = np.zeros(len(links), np.bool_)
        self._replies: list[deque[tuple[float, DraftStep]]] = [deque(maxlen=_MAX_REPLIES) for _ in links]
        self._wire_ids = 0
        self._ended: Ended | None = None
        self.waits = Waits(columns, self.planner, self.stats, self.links, first_link, timeout, self._verified_depth)

    def join(self, row: int) -> None:
        """A new sequence is at `row`."""
        if self.links:
            self.planner.join(row)

    def leave(self, row: int) -> None:
        """That at `row` has ended."""
        self.planner.prompts.ended()
        self.planner.shadows.dismiss(self._columns.handle(row))
        self._detach(row)

    def begin(self, order: IntArray, now: float) -> None:
        """A step of `order`, the oldest first, is next."""
        self._order = order
        self._learn()
        self._take_replies(now)
        self._rearrange(now)
        self._plan(now)
        self.assign(order, now)

    def end(self, ended: Ended) -> None:
        """The step is over."""
        self._ended = ended

    def heard(self, link: int, step_seconds: float, batch: int) -> None:
        """The worker of `link` sends proposals, and says what its steps take."""
        place = link - self._first_link
        self._has_proposed[place] = True
        self._replies[place].append((2.0 * float(self._ways[place]), DraftStep(step_seconds, batch, batch)))

    def turned_away(self, row: int, now: float) -> None:
        """The worker of `row` has no room for it."""
        columns = self._columns
        refusals = int(columns.refusals[row])
        columns.may_open_at[row], columns.refusals[row] = now + pause_seconds(refusals), refusals + 1
        self.stats.num_refused += 1
        self._detach(row)

    # The beginning of a step.

    def _learn(self) -> None:
        ended, self._ended = self._ended, None
        if ended is None:
            return
        planner, is_pure = self.planner, ended.prompts == 0
        drafted = ended.num_drafts > 0
        is_shadow = self._is_shadow(ended.rows)
        is_probe = planner.probing.is_probing and (not planner.shadows or bool((drafted & is_shadow).any()))
        promise = None
        if ended.rows.size and is_pure and ended.is_whole and not is_probe and planner.needs.measurements:
            promise = planner.promise(ended.rows)
        planner.observe_rounds(ended.rows[drafted], ended.num_drafts[drafted], ended.num_accepted[drafted])
        planner.probing.end_step(promise, ended.num_committed, ended.ended_at)
        if planner.shadows:
            rounds = self._shadow_rounds(ended)
            if planner.shadows.judge(rounds):
                planner.probing.done()
            for judged in rounds:
                if judged.sequence.proposal is None:
                    self._columns.held_base[row_of(judged.sequence)] = -1
        learn_step(planner.step_seconds, ended.num_choices, ended.prompt_tokens, ended.longest_context, ended.seconds)
        planner.prompts.observe(ended.prompt_tokens, ended.prompts, ended.num_committed, left_some=ended.left_prompts)

    def _shadow_rounds(self, ended: Ended) -> list[Round]:
        rounds = []
        for place in np.flatnonzero(self._is_shadow(ended.rows)).tolist():
            handle = self._columns.handle(int(ended.rows[place]))
            rounds.append(Round(handle, Drafts([0] * int(ended.num_drafts[place]))))
        return rounds

    def _is_shadow(self, rows: IntArray) -> BoolArray:
        found = np.zeros(len(rows), np.bool_)
        for sequence in self.planner.shadows:
            found |= rows == row_of(sequence)
        return found

    def _take_replies(self, now: float) -> None:
        columns, order = self._columns, self._order
        rows = order[columns.coming_at[order] <= now]
        if not rows.size:
            return
        columns.has_answered[rows] = True
        columns.refusals[rows] = 0
        base, length, right = columns.coming_base[rows], columns.coming_length[rows], columns.coming_right[rows]
        columns.coming_at[rows] = NEVER
        past = columns.length[rows] - base
        fits = past <= np.minimum(right, length)
        for place in np.flatnonzero(self._is_shadow(rows)).tolist():
            handle, number, num_right = columns.handle(int(rows[place])), int(length[place]), int(right[place])
            tokens = [0] * min(number, num_right) + [1] * max(0, number - num_right)
            handle.answered(Proposal(handle.wire_id, int(base[place]), tokens), now, self.stats)
            fits[place] = True
        held = rows[fits]
        columns.held_base[held], columns.held_length[held] = base[fits], length[fits]
        columns.held_right[held] = right[fits]
        self.stats.num_stale_proposals += len(rows) - len(held)
        is_current = past == 0
        columns.awaited_since[rows[is_current]] = NEVER
        behind = rows[~is_current & columns.is_late[rows]]
        columns.awaited_since[behind] = now
        columns.is_late[rows[is_current]] = columns.is_late[behind] = False

    def _rearrange(self, now: float) -> None:
        for sequence in self._balancer.to_move(now):
            self._detach(row_of(sequence))

    def _plan(self, now: float) -> None:
        planner, columns, order = self.planner, self._columns, self._order
        planner.probing.begin_step(awaits_shadow=bool(planner.shadows))
        if not self.links or not planner.schedule.is_due(len(order)):
            return
        for link, replies in zip(self.links, self._replies, strict=True):
            for overhead, step in replies:
                link.costs.observe_reply(overhead, step)
            replies.clear()
        self._worths.renew()
        rows = order[(columns.link[order] >= 0) | (columns.may_open_at[order] <= now)]
        best = self._balancer.best(_TEMPERATURE, now) if rows.size else None
        planner.plan(rows, lambda: self._handles(rows), self.links, best, len(order))

    def _handles(self, rows: IntArray) -> list[SpeculativeSequence]:
        return [self._columns.handle(row) for row in rows.tolist()]

    # Opening, and the messages to drafters.

    def assign(self, order: IntArray, now: float) -> None:
        """Opens sequences of `order` that want drafts and have no drafter."""
        columns = self._columns
        if not self.links:
            return
        may_open = (columns.link[order] < 0) & (columns.may_open_at[order] <= now)
        wants = np.minimum(columns.depth[order], columns.max_len[order] - columns.length[order] - 1) > 0
        wants |= self._is_shadow(order)
        for row in order[may_open & wants].tolist():
            handle = columns.handle(row)
            link = self._balancer.choose(handle, 0, now)
            if link is None:
                columns.may_open_at[row] = now + pause_seconds(0)
                continue
            self._wire_ids += 1
            handle.opened(link, self._wire_ids)
            columns.forget(row)
            columns.link[row] = self._first_link + self.links.index(link)
            columns.has_answered[row] = False
            self._ask(np.array([row]), now, is_opening=True)

    def tell(self, now: float) -> None:
        """The drafters of the sequences that go on."""
        ended, columns = self._ended, self._columns
        if ended is None:
            return
        rows = ended.rows[columns.link[ended.rows] >= 0]
        if rows.size:
            self._ask(rows, now, is_opening=False)

    def _ask(self, rows: IntArray, now: float, *, is_opening: bool) -> None:
        columns = self._columns
        place = columns.link[rows] - self._first_link
        left = columns.max_len[rows] - columns.length[rows]
        depth = columns.depth[rows]
        depth = np.where(depth >= left, np.maximum(0, np.minimum(depth, left - 1)), depth)
        if self.planner.needs.measurements:
            depth = np.where(self._has_proposed[place], depth, np.minimum(depth, 1))
        is_shadow = self._is_shadow(rows)
        for number in np.flatnonzero(is_shadow).tolist():
            depth[number] = self.planner.shadows.wanted(columns.handle(int(rows[number])), now)
        asks = depth > 0
        quiet = rows[~asks]
        columns.awaited_since[quiet] = NEVER
        columns.is_late[quiet] = False
        told = asks | is_opening
        rows, depth, place, asks, is_shadow = rows[told], depth[told], place[told], asks[told], is_shadow[told]
        if not rows.size:
            return
        columns.levels[rows] = depth
        on_time = rows[asks & ~columns.is_late[rows] & (columns.refusals[rows] == 0)]
        columns.awaited_since[on_time] = now
        # What has arrived and was not taken in yet is merged; what is on its way arrives with this.
        arrives_at = now + self._ways[place]
        told_at = columns.told_at[rows]
        columns.told_at[rows] = np.where(told_at <= now, told_at, arrives_at)
        columns.told_length[rows], columns.told_depth[rows] = columns.length[rows], depth
        if is_opening:
            columns.is_opening[rows] = True
        else:
            owed = ~is_shadow
            self.waits.owe(place[owed], depth[owed])
        self._touch(place, arrives_at, is_opening)

    def _touch(self, places: IntArray, arrive_at: FloatArray, is_opening: bool) -> None:
        """Messages go to the workers at `places`."""
        if len(places) == 1:
            self._told(int(places[0]) + self._first_link, float(arrive_at[0]), is_opening)
            return
        for place in np.bincount(places).nonzero()[0].tolist():
            self._told(place + self._first_link, float(arrive_at[0]), is_opening)

    def _detach(self, row: int) -> None:
        """Its drafter forgets `row`."""
        columns = self._columns
        handle, link = columns.handle(row), int(columns.link[row])
        handle.detached()
        columns.forget(row)
        if link >= 0:
            self._told(link, NEVER, True)

    # Waiting.

    def begin_wait(self, now: float) -> float | None:
        """Begins to wait for proposals. Returns when to `wake`; None: the step need not wait."""
        return self.waits.begin(self._order[~self._columns.is_prefilling[self._order]], now)

    def wake(self, now: float) -> float | None:
        """Proposals have come, or it is time to give some up. Returns what `begin_wait` returns."""
        wakes_at = self.waits.wake(now)
        if wakes_at is None:
            self._take_replies(now)
        return wakes_at

    # What is verified.

    def _verified_depth(self, rows: IntArray) -> IntArray:
        planner = self.planner
        if planner.leaves_drafts_out:
            return np.zeros(len(rows), np.int64)
        depth = self._columns.depth[rows]
        if planner.shadows:
            depth = np.where(self._is_shadow(rows), SHADOW_DEPTH if planner.probing.is_probing else 0, depth)
        return depth

    def drafts(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """How many of what was proposed are verified, and how many of them in a row are right."""
        columns = self._columns
        base = columns.held_base[rows]
        past = columns.length[rows] - base
        right, length = columns.held_right[rows], columns.held_length[rows]
        fits = (base >= 0) & (past <= np.minimum(right, length))
        depth = self._verified_depth(rows)
        columns.held_base[rows[~fits & (depth > 0)]] = -1
        useful = columns.max_len[rows] - columns.length[rows] - 1
        number = np.where(fits, np.minimum(np.minimum(length - past, depth), useful), 0)
        return np.maximum(number, 0), np.where(fits, right - past, 0)
