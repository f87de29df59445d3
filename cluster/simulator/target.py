"""A target's steps: what `cluster.targets.step_loop` and `cluster.engine.scheduler` do, for all of a step at once.

begin       a step begins, or a wait for proposals (`rounds`)
wake        looks whether the wait is over, and then begins the step
end_step    accepts and commits, admits what came meanwhile, has the drafters told, and begins the next
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cluster.config import Config
from cluster.engine.limits import StepLimits
from cluster.engine.prompt_pace import PromptPace, PromptPart
from cluster.simulation.steps import StepCurve
from cluster.simulator.blocks import Blocks
from cluster.simulator.columns import BoolArray, Columns
from cluster.simulator.overheads import Overheads
from cluster.simulator.rounds import Ended, Rounds
from cluster.speculation.depth import IntArray

_NONE = np.zeros(0, np.int64)


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


class Target:
    def __init__(
        self,
        index: int,
        config: Config,
        num_blocks: int,
        columns: Columns,
        rows: range,
        rounds: Rounds,
        recorder: Recorder,
        overheads: Overheads,
    ) -> None:
        """Its sequences take `rows` of `columns`."""
        self.index = index
        self.rounds = rounds
        self.waiting: deque[Request | int] = deque()  # an int: the row of one that was preempted
        self.num_in_flight = 0
        self.num_preemptions = 0
        self.is_idle = True
        self.blocks = Blocks(columns, num_blocks, config.target.block_size)
        self._columns = columns
        self._recorder = recorder
        self._overheads = overheads
        self._limits = StepLimits.of(config.target, 2**62)
        self._curve = StepCurve(config.simulation.target_step_ms)
        self._sequence_seconds = config.simulation.target_sequence_ms / 1e3
        self._pace = PromptPace(self._limits.max_prefill_seconds, self._limits.max_num_batched_tokens)
        self._free_rows = list(reversed(rows))
        self._order = _NONE  # sequences that run, the oldest first
        self._step: _Step | None = None
        self._profile()

    def _profile(self) -> None:
        """What steps take, before the first request."""
        num_rows, times = 1, []
        while num_rows <= self._limits.max_num_batched_tokens:
            times.append((num_rows, self._curve.at(num_rows) + self._sequence_seconds))
            num_rows *= 2
        for rows, seconds in times:
            self.rounds.planner.step_seconds.observe(rows, seconds)
        self._pace.know(times)

    # What a cluster asks.

    def submit(self, request: Request) -> None:
        """It waits for admission. Its tokens must fit."""
        self.waiting.append(request)

    def begin(self, now: float) -> float | None:
        """A step begins, or a wait for proposals. Returns when it is over, or to `wake`; None: it has nothing to do."""
        if not self._order.size:
            self._admit()
        self.is_idle = not self._order.size
        if self.is_idle:
            return None
        self.rounds.begin(self._order, now)
        wakes_at = self.rounds.begin_wait(now)
        return self._start(now) if wakes_at is None else wakes_at

    def wake(self, now: float) -> float | None:
        """Proposals have come, or it is time to give some up; returns what `begin` returns."""
        wakes_at = self.rounds.wake(now)
        return self._start(now) if wakes_at is None else wakes_at

    def end_step(self, now: float) -> float | None:
        """The step is over that was begun; returns what `begin` returns of the next."""
        self._commit(now)
        self._admit()
        self.rounds.tell(now)
        self.rounds.assign(self._order, now)
        return self.begin(now)

    # The step.

    def _start(self, now: float) -> float | None:
        """The step begins; returns when it ends."""
        columns = self._columns
        decoding = self._order[~columns.is_prefilling[self._order]]
        if self.rounds.waits.held_back.size:
            decoding = decoding[~np.isin(decoding, self.rounds.waits.held_back)]
        num_begun = len(decoding)
        may_grow, num_kept = self.blocks.grow(self._order)
        if num_kept < len(self._order):
            self._preempt(self._order[num_kept:])
            decoding = decoding[np.isin(decoding, self._order)]
        prefilling = self._order[columns.is_prefilling[self._order]]
        num_drafts, num_right = np.zeros(len(decoding), np.int64), np.zeros(len(decoding), np.int64)
        budget = self._limits.max_num_batched_tokens - len(decoding)
        if self.rounds.links and decoding.size:
            num_drafts, num_right = self.rounds.drafts(decoding)
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
            self.rounds.waits.seconds,
            num_begun,
        )
        return now + over + seconds

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

    # Its end.

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
        ended = Ended(
            rows[goes_on],
            num_drafts[goes_on],
            num_accepted[goes_on],
            int((num_accepted[goes_on] + 1).sum()),
            len(rows) + int(num_drafts.sum()),
            len(step.parts),
            sum(part.num_tokens for part in step.parts),
            bool(columns.is_prefilling[self._order].any()),
            max((part.num_before for part in step.parts), default=0),
            step.seconds,
            is_whole,
            now,
        )
        self.rounds.end(ended)
        if is_finished.any():
            self._release(rows[is_finished])

    def _release(self, rows: IntArray) -> None:
        columns = self._columns
        self.blocks.free(rows)
        self._order = self._order[~np.isin(self._order, rows)]
        for row in rows.tolist():
            self.rounds.leave(row)
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
                self.rounds.join(row)
            admitted.append(row)
        if admitted:
            self._order = np.concatenate([self._order, np.array(admitted, np.int64)])
