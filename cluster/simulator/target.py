"""A target's steps and the rounds of its sequences.

What `cluster.targets.step_loop`, `cluster.engine.scheduler` and `cluster.coordination.coordinator` do for sequences one
by one, for all of a step at once. A step, event by event:

    begin       learns from the last step, plans, opens sequences, and begins to wait for proposals
    wake        looks whether the wait is over
    end_step    accepts and commits, admits what came meanwhile, and tells the drafters
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cluster.config import Config
from cluster.coordination.balancer import LinkBalancer
from cluster.coordination.openings import pause_seconds
from cluster.coordination.sequence import Round, SpeculativeSequence
from cluster.coordination.shadows import SHADOW_DEPTH
from cluster.coordination.stats import CoordinatorStats
from cluster.coordination.waiting import pays_alone, slows_others
from cluster.engine.limits import StepLimits
from cluster.engine.prompt_pace import PromptPace, PromptPart
from cluster.simulation.steps import StepCurve
from cluster.simulator.blocks import Blocks
from cluster.simulator.columns import NEVER, BoolArray, Columns, row_of
from cluster.simulator.overheads import Overheads
from cluster.simulator.planner import Planner
from cluster.simulator.worths import Worths
from cluster.speculation.depth import IntArray
from cluster.speculation.drafts import Drafts
from cluster.speculation.goodput import FloatArray
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


@dataclass(frozen=True, slots=True)
class Request:
    """One that has come to a target."""

    number: int
    prompt_tokens: int
    answer_tokens: int


class Recorder(Protocol):
    """Takes down what happens to requests."""

    def stepped(self, target: int, now: float, step: Committed) -> None: ...


@dataclass(frozen=True, slots=True)
class Committed:
    """What came of a step: an entry for each sequence that committed something."""

    requests: IntArray
    num_tokens: IntArray
    num_drafts: IntArray
    num_accepted: IntArray
    is_first: BoolArray  # its first token is among these
    is_finished: BoolArray
    num_rounds: IntArray  # of the whole sequence so far
    seconds: float  # of the step
    wait_seconds: float  # before it
    num_rows: int
    num_waiting: int  # requests that were not admitted


@dataclass(slots=True)
class _Step:
    rows: IntArray  # that decode
    num_drafts: IntArray
    num_right: IntArray  # of the drafts
    prompts: IntArray  # rows whose prompts have a part in it
    chunks: IntArray
    parts: list[PromptPart]  # those of more than one token
    num_rows: int
    seconds: float
    wait_seconds: float
    num_begun: int  # sequences that decode, and were not held back


@dataclass(slots=True)
class _Ended:
    """What is learned from a step, at the beginning of the next."""

    rows: IntArray  # of sequences that go on
    num_drafts: IntArray
    num_accepted: IntArray
    num_committed: int
    num_choices: int
    prompts: int
    prompt_tokens: int
    seconds: float
    is_whole: bool
    ended_at: float


@dataclass(slots=True)
class _Wait:
    started_at: float
    rows: IntArray


class Target:
    def __init__(
        self,
        index: int,
        config: Config,
        num_blocks: int,
        columns: Columns,
        rows: range,
        links: Sequence[Link],
        first_link: int,
        clock: Callable[[], float],
        recorder: Recorder,
        overheads: Overheads,
        told: Callable[[int, float, bool], None],
    ) -> None:
        """Its sequences take `rows` of `columns`; `links` are to the draft workers that it uses, from number
        `first_link` on; `told` is called when a message goes to one, with when it arrives and whether its sequences
        change."""
        self.index = index
        self.waiting: deque[Request | int] = deque()  # an int: the row of one that was preempted
        self.num_in_flight = 0
        self.num_preemptions = 0
        self.busy_seconds = self.wait_seconds = 0.0
        self.is_idle = True
        self.stats = CoordinatorStats()
        self.blocks = Blocks(columns, num_blocks, config.target.block_size)
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
        self.told = told
        self._recorder = recorder
        self._overheads = overheads
        self._limits = StepLimits.of(config.target, 2**62)
        self._timeout = config.speculation.draft_timeout_ms / 1e3
        self._curve = StepCurve(config.simulation.target_step_ms)
        self._sequence_seconds = config.simulation.target_sequence_ms / 1e3
        self._pace = PromptPace(self._limits.max_prefill_seconds, self._limits.max_num_batched_tokens)
        self._worths = Worths(self.planner)
        self._balancer = LinkBalancer(
            self._limits.max_num_seqs, self._timeout, self._worths, config.placement.trial_share
        )
        for link in links:
            self._balancer.add(link)
        self.links = list(self._balancer.active.values())
        self._first_link = first_link
        self._ways = np.array([link.way_seconds for link in links])
        self._free_rows = list(reversed(rows))
        self._order = _NONE  # sequences that run, the oldest first
        self._num_owed = np.zeros(len(links), np.int64)
        self._depth_owed = np.zeros(len(links), np.int64)
        self._has_proposed = np.zeros(len(links), np.bool_)
        self._replies: list[deque[tuple[float, float, int]]] = [deque(maxlen=_MAX_REPLIES) for _ in links]
        self._wire_ids = 0
        self._step: _Step | None = None
        self._ended: _Ended | None = None
        self._wait: _Wait | None = None
        self._held_back: IntArray = _NONE
        self._profile()

    def _profile(self) -> None:
        """What steps take, before the first request."""
        num_rows, times = 1, []
        while num_rows <= self._limits.max_num_batched_tokens:
            times.append((num_rows, self._curve.at(num_rows) + self._sequence_seconds))
            num_rows *= 2
        for rows, seconds in times:
            self.planner.step_seconds.observe(rows, seconds)
        self._pace.know(times)

    # What a cluster asks.

    def submit(self, request: Request) -> None:
        """It waits for admission. Its tokens must fit."""
        self.waiting.append(request)

    def begin(self, now: float) -> float | None:
        """A step begins, or a wait for proposals. Returns when it is over, or to `wake`; None: when they come; an idle
        target has nothing to do."""
        if not self._order.size:
            self._admit()
        self.is_idle = not self._order.size
        if self.is_idle:
            return None
        self._learn()
        self._take_replies(now)
        self._rearrange(now)
        self._plan(now)
        self._assign(now)
        return self._begin_wait(now)

    def end_step(self, now: float) -> float | None:
        """The step is over that was begun; returns what `begin` returns of the next."""
        self._commit(now)
        self._admit()
        self._tell(now)
        self._assign(now)
        return self.begin(now)

    def wake(self, now: float) -> float | None:
        """Proposals have come, or it is time to give some up; returns what `begin` returns."""
        wait, columns = self._wait, self._columns
        assert wait is not None
        rows = wait.rows
        is_awaited = columns.is_waited_for[rows]
        here = is_awaited & (columns.coming_at[rows] <= now)
        given_up = is_awaited & ~here & (now >= columns.awaited_since[rows] + self._timeout)
        if given_up.any():
            columns.is_late[rows[given_up]] = True
            self.stats.num_late_rounds += int(given_up.sum())
        columns.is_waited_for[rows[here | given_up]] = False
        left = self._still_awaited(rows)
        if left.size:
            return self._wakes_at(left)
        self._wait = None
        self._waited(rows, wait.started_at, now)
        self._take_replies(now)
        return self._start(now, now - wait.started_at, uses_drafts=True)

    @property
    def is_waiting(self) -> bool:
        """For proposals."""
        return self._wait is not None

    def wakes_at(self) -> float | None:
        """When to `wake`, now that more proposals are on their way; None: nothing is waited for."""
        return None if self._wait is None else self._wakes_at(self._still_awaited(self._wait.rows))

    def heard(self, link: int, step_seconds: float, batch: int) -> None:
        """The worker of `link` sends proposals, and says what its steps take."""
        place = link - self._first_link
        self._has_proposed[place] = True
        self._replies[place].append((2.0 * float(self._ways[place]), step_seconds, batch))

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
        is_shadow = self._is_shadow(ended.rows) if planner.shadows else _NONE
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
        if is_pure:
            planner.step_seconds.observe(ended.num_choices, ended.seconds)
        planner.prompts.observe(ended.prompt_tokens, ended.prompts, ended.num_committed)

    def _shadow_rounds(self, ended: _Ended) -> list[Round]:
        rounds = []
        for place in np.flatnonzero(self._is_shadow(ended.rows)).tolist():
            handle = self._columns.handle(int(ended.rows[place]))
            rounds.append(Round(handle, Drafts([0] * int(ended.num_drafts[place]))))
        return rounds

    def _is_shadow(self, rows: IntArray) -> BoolArray:
        return np.array([self._columns.handle(row).is_shadow for row in rows.tolist()], np.bool_)

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
        if self.planner.shadows:
            for row, own, number, num_right in zip(
                rows.tolist(), base.tolist(), length.tolist(), right.tolist(), strict=True
            ):
                handle = columns.handle(row)
                if handle.is_shadow:
                    tokens = [0] * min(number, num_right) + [1] * max(0, number - num_right)
                    handle.answered(Proposal(handle.wire_id, own, tokens), now, self.stats)
                    fits[rows == row] = True
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
            for reply in replies:
                link.costs.observe_reply(reply[0], 0.0, reply[1], reply[2])
            replies.clear()
        self._worths.renew()
        rows = order[(columns.link[order] >= 0) | (columns.may_open_at[order] <= now)]
        best = self._balancer.best(_TEMPERATURE, now) if rows.size else None
        planner.plan(rows, lambda: self._handles(rows), self.links, best, len(order))

    def _handles(self, rows: IntArray) -> list[SpeculativeSequence]:
        return [self._columns.handle(row) for row in rows.tolist()]

    # Opening, and the messages to drafters.

    def _assign(self, now: float) -> None:
        columns, order = self._columns, self._order
        if not self.links:
            return
        may_open = (columns.link[order] < 0) & (columns.may_open_at[order] <= now)
        wants = np.minimum(columns.depth[order], columns.max_len[order] - columns.length[order] - 1) > 0
        if self.planner.shadows:
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

    def _tell(self, now: float) -> None:
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
        is_shadow = np.zeros(len(rows), np.bool_)
        if self.planner.shadows:
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
            self._num_owed += np.bincount(place[owed], minlength=len(self.links))
            np.maximum.at(self._depth_owed, place[owed], depth[owed])
        self._touch(place, arrives_at, is_opening)

    def _touch(self, places: IntArray, arrive_at: FloatArray, is_opening: bool) -> None:
        """Messages go to the workers at `places`."""
        if len(places) == 1:
            self.told(int(places[0]) + self._first_link, float(arrive_at[0]), is_opening)
            return
        for place in np.bincount(places).nonzero()[0].tolist():
            self.told(place + self._first_link, float(arrive_at[0]), is_opening)

    def _detach(self, row: int) -> None:
        """Its drafter forgets `row`."""
        columns = self._columns
        handle, link = columns.handle(row), int(columns.link[row])
        handle.detached()
        columns.forget(row)
        if link >= 0:
            self.told(link, NEVER, True)

    # Waiting.

    def _begin_wait(self, now: float) -> float | None:
        columns, planner = self._columns, self.planner
        decoding = self._order[~columns.is_prefilling[self._order]]
        self._held_back = _NONE
        if not self.links or planner.leaves_drafts_out:
            return self._start(now, 0.0, uses_drafts=False)
        since, is_late = columns.awaited_since[decoding], columns.is_late[decoding]
        has_depth = columns.depth[decoding] > 0
        is_awaited = (since < NEVER) & ~is_late & has_depth
        if is_late.any() or is_awaited.any():
            has_answered = columns.has_answered[decoding]
            if ((since == NEVER) | has_answered).any():
                # Drafters of new sequences still compute the tokens that these were opened with: others do not wait.
                columns.is_late[decoding[is_awaited & ~has_answered]] = True
                is_awaited &= has_answered
            is_late = columns.is_late[decoding]
            self._went_without(decoding[is_late], decoding[is_awaited])
        if not is_awaited.any():
            self._waited(_NONE, now, now)
            return self._start(now, 0.0, uses_drafts=True)
        awaited = decoding[is_awaited]
        if len(awaited) < len(decoding) and planner.needs.measurements and planner.step_seconds.is_known:
            to_wait = self._seconds_to_wait(awaited, now)
            num_plain = int(((columns.link[decoding] < 0) & has_depth).sum())
            rows_awaited = len(awaited) + int(columns.depth[awaited].sum())
            if num_plain > len(awaited) and slows_others(
                to_wait, planner.step_seconds.seconds(num_plain + rows_awaited)
            ):
                self._waited(_NONE, now, now)
                return self._start(now, 0.0, uses_drafts=True)
            ready = decoding[~is_awaited]
            rows_ready = len(ready) + int(self._verified_depth(ready).sum())
            tokens_ready = float(columns.expected[ready].sum())
            tokens = tokens_ready + float(columns.expected[awaited].sum())
            rows = rows_ready, rows_ready + rows_awaited
            if pays_alone(planner.step_seconds, rows, (tokens_ready, tokens), to_wait):
                self._held_back = awaited
                return self._start(now, 0.0, uses_drafts=True)
        columns.is_waited_for[awaited] = True
        self._wait = _Wait(now, awaited)
        return self._wakes_at(awaited)

    def _wakes_at(self, rows: IntArray) -> float:
        """When the next of `rows` that are waited for is given up, or all have come."""
        columns = self._columns
        until = float(columns.awaited_since[rows].min()) + self._timeout
        return min(until, float(columns.coming_at[rows].max()))

    def _still_awaited(self, rows: IntArray) -> IntArray:
        return rows[self._columns.is_waited_for[rows]]

    def _seconds_to_wait(self, awaited: IntArray, now: float) -> float:
        columns = self._columns
        place = columns.link[awaited] - self._first_link
        takes = np.zeros(len(awaited))
        for number, batch in enumerate(np.bincount(place).tolist()):
            if batch:
                costs, mine = self.links[number].costs, place == number
                way = costs.proposal_seconds(0, batch)
                level = costs.proposal_seconds(1, batch) - way
                takes[mine] = way + columns.levels[awaited[mine]] * level
        return max(0.0, float((columns.awaited_since[awaited] + takes).max()) - now)

    def _went_without(self, late: IntArray, awaited: IntArray) -> None:
        columns, size = self._columns, len(self.links)
        links = columns.link[late]
        is_late = np.bincount(links[links >= 0] - self._first_link, minlength=size) > 0
        is_late &= np.bincount(columns.link[awaited] - self._first_link, minlength=size) == 0
        self._num_owed[is_late] = self._depth_owed[is_late] = 0

    def _waited(self, rows: IntArray, started_at: float, now: float) -> None:
        """A step has waited since then for the proposals of `rows`, and for those of no other link at all."""
        if not self._num_owed.any():
            return
        seconds = np.zeros(len(self.links))
        if rows.size:
            came_at = np.minimum(self._columns.coming_at[rows], now)
            seconds[:] = float(came_at.min())
            np.maximum.at(seconds, self._columns.link[rows] - self._first_link, came_at)
            seconds -= started_at
        for place in self._num_owed.nonzero()[0].tolist():
            costs = self.links[place].costs
            costs.observe_wait(float(seconds[place]), int(self._depth_owed[place]), int(self._num_owed[place]))
        self._num_owed[:] = self._depth_owed[:] = 0

    # The step.

    def _verified_depth(self, rows: IntArray) -> IntArray:
        planner = self.planner
        if planner.leaves_drafts_out:
            return np.zeros(len(rows), np.int64)
        depth = self._columns.depth[rows]
        if planner.shadows:
            depth = np.where(self._is_shadow(rows), SHADOW_DEPTH if planner.probing.is_probing else 0, depth)
        return depth

    def _start(self, now: float, waited: float, *, uses_drafts: bool) -> float | None:
        """The step begins; returns when it ends."""
        columns = self._columns
        decoding = self._order[~columns.is_prefilling[self._order]]
        if self._held_back.size:
            decoding = decoding[~np.isin(decoding, self._held_back)]
        num_begun = len(decoding)
        may_grow, num_kept = self.blocks.grow(self._order)
        if num_kept < len(self._order):
            self._preempt(self._order[num_kept:])
            decoding = decoding[np.isin(decoding, self._order)]
        prefilling = self._order[columns.is_prefilling[self._order]]
        num_drafts, num_right = np.zeros(len(decoding), np.int64), np.zeros(len(decoding), np.int64)
        budget = self._limits.max_num_batched_tokens - len(decoding)
        if uses_drafts and self.links and decoding.size:
            num_drafts, num_right = self._drafts(decoding)
            limit = budget // 2 if prefilling.size else budget
            if int(num_drafts.sum()) > limit:
                before = np.cumsum(num_drafts) - num_drafts
                num_drafts = np.clip(limit - before, 0, num_drafts)
            if num_drafts.any():
                num_drafts = self.blocks.place(decoding, num_drafts, may_grow=may_grow)
        total = int(num_drafts.sum())
        chunks, parts = self._chunks(prefilling, budget - total, is_alone=len(prefilling) == 1 and not decoding.size)
        is_in = chunks > 0
        num_rows = len(decoding) + total + int(chunks.sum())
        num_sequences = len(decoding) + int(is_in.sum())
        if not num_sequences:  # all of it was preempted, or waits
            return self._nothing(now)
        seconds = self._curve.at(num_rows) + self._sequence_seconds * num_sequences
        over = self._overheads.seconds(num_sequences)
        self._pace.observe(num_rows, parts, seconds)
        self._step = _Step(
            decoding,
            num_drafts,
            num_right,
            prefilling[is_in],
            chunks[is_in],
            parts,
            num_rows,
            seconds,
            waited,
            num_begun,
        )
        self.busy_seconds += seconds
        self.wait_seconds += waited
        return now + over + seconds

    def _drafts(self, rows: IntArray) -> tuple[IntArray, IntArray]:
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

    def _chunks(self, prefilling: IntArray, budget: int, *, is_alone: bool) -> tuple[IntArray, list[PromptPart]]:
        """Tokens of each prompt, and what the pace is told of those that are not nought."""
        if not prefilling.size:
            return _NONE, []
        columns = self._columns
        computed = columns.computed[prefilling]
        left = columns.length[prefilling] - computed
        prompts = [PromptPart(n, before) for n, before in zip(left.tolist(), computed.tolist(), strict=True)]
        chunks = self._pace.share(prompts, budget, self._pace.budget(is_alone=is_alone))
        parts = [PromptPart(n, prompt.num_before) for n, prompt in zip(chunks, prompts, strict=True) if n > 1]
        return np.array(chunks, np.int64), parts

    def _preempt(self, rows: IntArray) -> None:
        columns = self._columns
        self.num_preemptions += len(rows)
        self._order = self._order[: len(self._order) - len(rows)]
        for row in rows[::-1].tolist():
            columns.computed[row] = 0
            self.waiting.appendleft(row)

    def _nothing(self, now: float) -> float | None:
        self._admit()
        return self.begin(now)

    # The end of a step.

    def _commit(self, now: float) -> None:
        step, columns = self._step, self._columns
        assert step is not None
        self._step = None
        columns.computed[step.prompts] += step.chunks
        begins = step.prompts[columns.computed[step.prompts] >= columns.length[step.prompts]]
        columns.is_prefilling[begins] = False
        rows = np.concatenate([step.rows, begins]) if begins.size else step.rows
        more = np.zeros(len(begins), np.int64)
        num_drafts = np.concatenate([step.num_drafts, more]) if begins.size else step.num_drafts
        num_right = np.concatenate([step.num_right, more]) if begins.size else step.num_right
        num_accepted = np.minimum(num_right, num_drafts)
        left = columns.max_len[rows] - columns.length[rows]
        num_tokens = np.minimum(num_accepted + 1, left)
        columns.length[rows] += num_tokens
        columns.num_rounds[rows] += 1
        is_finished = num_tokens == left
        is_first = np.zeros(len(rows), np.bool_)
        is_first[len(step.rows) :] = columns.num_rounds[begins] == 1
        self._recorder.stepped(
            self.index,
            now,
            Committed(
                columns.request[rows],
                num_tokens,
                num_drafts,
                np.minimum(num_accepted, num_tokens),
                is_first,
                is_finished,
                columns.num_rounds[rows],
                step.seconds,
                step.wait_seconds,
                step.num_rows,
                len(self.waiting),
            ),
        )
        goes_on = ~is_finished
        is_whole = int(goes_on.sum()) == step.num_begun
        self._ended = _Ended(
            rows[goes_on],
            num_drafts[goes_on],
            num_accepted[goes_on],
            int((num_accepted[goes_on] + 1).sum()),
            len(rows) + int(num_drafts.sum()),
            len(step.parts),
            sum(part.num_tokens for part in step.parts),
            step.seconds,
            is_whole,
            now,
        )
        if is_finished.any():
            self._release(rows[is_finished])

    def _release(self, rows: IntArray) -> None:
        columns = self._columns
        self.blocks.free(rows)
        self._order = self._order[~np.isin(self._order, rows)]
        for row in rows.tolist():
            self.planner.shadows.dismiss(columns.handle(row))
            self._detach(row)
            columns.handles[row] = None
            self._free_rows.append(row)
        self.num_in_flight -= len(rows)

    def _admit(self) -> None:
        columns = self._columns
        admitted: list[int] = []
        while self.waiting and len(self._order) + len(admitted) < self._limits.max_num_seqs:
            first = self.waiting[0]
            is_new = isinstance(first, Request)
            row = self._free_rows[-1] if isinstance(first, Request) else first
            if isinstance(first, Request):
                columns.admit(row, first.number, first.prompt_tokens, first.answer_tokens)
            if not self.blocks.admit(row, is_alone=not (self._order.size or admitted)):
                break
            self.waiting.popleft()
            columns.is_prefilling[row], columns.computed[row] = True, 0
            if is_new:
                self._free_rows.pop()
                columns.target[row] = self.index
                if self.links:
                    self.planner.join(row)
            admitted.append(row)
        if admitted:
            self._order = np.concatenate([self._order, np.array(admitted, np.int64)])
