"""The last steps of a target and the last answers of its drafters.

They show whether the target waits for the drafters or the drafters wait for the target. Times are those of the
coordinator's clock, in seconds. The engine's thread writes; any thread may read.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

_NUM_KEPT = 256

T = TypeVar("T")


class StepSpan(NamedTuple):
    """A step, which waited for proposals and then ran until `ended_at`."""

    ended_at: float
    waited_seconds: float
    seconds: float
    num_sequences: int  # sequences that decoded
    num_rows: int  # rows that yielded a token: one per sequence, one per draft, and the last one of a prompt
    has_prompts: bool  # whether the step also computed parts of prompts


class AnswerSpan(NamedTuple):
    """A drafter's answer. `seconds`: time from the last message to the drafter until its reply.

    Of these `seconds`, the drafter held the answer for `held_seconds`; the rest was spent in the network.
    """

    came_at: float
    seconds: float
    held_seconds: float
    step_seconds: float  # time of the drafter's last step, in which each of `batch` sequences got a token
    batch: int
    num_proposals: int
    draft: str  # address of the worker


class Spans(Generic[T]):
    """The last `_NUM_KEPT` spans of one kind, numbered from 0 in order of arrival."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, T]] = deque(maxlen=_NUM_KEPT)
        self._numbers = itertools.count()

    def add(self, span: T) -> None:
        self._kept.append((next(self._numbers), span))

    def since(self, number: int) -> tuple[int, list[T]]:
        """Returns the number of the next span, and the kept spans from `number` on."""
        kept = list(self._kept)  # an atomic copy: another thread appends
        return kept[-1][0] + 1 if kept else 0, [span for own, span in kept if own >= number]


class Timeline:
    def __init__(self) -> None:
        self.steps: Spans[StepSpan] = Spans()
        self.answers: Spans[AnswerSpan] = Spans()

    def add(self, news: News) -> None:
        """Adds entries of another timeline, such as that of another process."""
        for step in news.steps:
            self.steps.add(step)
        for answer in news.answers:
            self.answers.add(answer)


class News(NamedTuple):
    """Entries of a timeline that are new since the reader's last call."""

    steps: Sequence[StepSpan] = ()
    answers: Sequence[AnswerSpan] = ()


class TimelineReader:
    """Reads each span of a timeline once. Not thread-safe."""

    def __init__(self) -> None:
        self._timeline: Timeline | None = None
        self._next_step = self._next_answer = 0

    def news(self, timeline: Timeline) -> News:
        """Returns the new entries of `timeline`; all kept entries if it is not the timeline of the previous call."""
        if timeline is not self._timeline:
            self._timeline, self._next_step, self._next_answer = timeline, 0, 0
        self._next_step, steps = timeline.steps.since(self._next_step)
        self._next_answer, answers = timeline.answers.since(self._next_answer)
        return News(steps, answers)
