"""Drafter in the target's process, behind the interface of a pool of draft workers. Nothing is encoded or sent.

The drafter can compute in the engine's thread, in turn with the target: it drafts proposals while a step waits for
them, and no thread has to be woken. Or it can compute in its own thread, as in a draft worker. Only with its own thread
can it run ahead, which pays if the target leaves cores or a device free.

A drafter that fails is handled like a draft worker that died: sequences decode without drafts, and after a pause the
pool restarts the drafter.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial

import torch

from cluster.config.speculation import SpeculationConfig
from cluster.coordination.backoff import Backoff
from cluster.coordination.base import LinkEvent, LinkPool, LinkState, take_all
from cluster.drafters.base import Drafter
from cluster.drafting.worker import DraftWorker
from cluster.simulated_engines.steps import REAL_TIME, Timekeeper
from cluster.telemetry.metrics import Reading
from cluster.wire.messages import SpeculateReply, SpeculateRequest

logger = logging.getLogger(__name__)

_MAX_PAUSE_SECONDS = 30.0  # approximate pause between a failure and the next attempt
_STABLE_SECONDS = 5.0  # if a drafter fails after this time, the next pause is short again


class InProcessLink:
    """Link to the drafter, from a start of the drafter until it fails."""

    address = ""

    def __init__(
        self,
        worker: DraftWorker,
        model: str,
        notify: Callable[[LinkEvent], None],
        ended: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        """`ended`: called after a request that closes sequences."""
        self.worker = worker
        self.model = model
        self.is_one_pass = worker.is_one_pass
        self.expected_round_trip: float | None = 0.0
        self._notify = notify
        self._ended = ended
        self._clock = clock
        self._sent_at = 0.0
        self._number = worker.attach(self._deliver)

    def send(self, request: SpeculateRequest) -> None:
        self._sent_at = self._clock()
        self.worker.receive(self._number, request)
        if request.closes:
            self._ended()

    def _deliver(self, reply: SpeculateReply) -> None:
        self._notify(LinkEvent(self, reply, self._clock() - self._sent_at))


class InProcessPool(LinkPool):
    """Pool of one drafter, which is up from the start.

    `model` is the name of the draft model. The drafter computes with `num_threads` threads (None: as many as the
    target). With `has_own_thread` False the drafter computes in turn with the target, and does not run ahead.
    """

    def __init__(
        self,
        drafter: Drafter,
        model: str,
        speculation: SpeculationConfig,
        num_threads: int | None = None,
        *,
        has_own_thread: bool = False,
        keeper: Timekeeper = REAL_TIME,
    ) -> None:
        self.trial_share = 0.0
        self.drafts_in_turn = not has_own_thread
        self._keeper = keeper
        self._drafter = drafter
        self._model = model
        self._speculation = speculation
        self._num_threads = num_threads
        self._events: queue.SimpleQueue[LinkEvent] = queue.SimpleQueue()
        self._backoff = Backoff()
        self._retry_at = 0.0  # time of the next attempt
        self._up_at = 0.0
        self._link: InProcessLink | None = None
        self._worker = self._begin()

    @property
    def num_endpoints(self) -> int:
        return 1

    @property
    def num_links_up(self) -> int:
        return int(self._link is not None)

    async def run(self, endpoints: AsyncIterator[Sequence[str]]) -> None:
        """Ignores `endpoints`, because there is no other drafter."""
        try:
            await asyncio.Event().wait()
        finally:
            self.stop()

    def stop(self) -> None:
        """Ends the drafter's own thread, if it has one."""
        if not self.drafts_in_turn:
            self._worker.stop()

    def poll(self, timeout: float = 0.0) -> list[LinkEvent]:
        self._watch()
        if not self.drafts_in_turn:
            return take_all(self._events, timeout)
        if timeout > 0.0:
            self._draft(timeout)
        return take_all(self._events, 0.0)

    def lend_turn(self) -> None:
        link = self._link
        if self.drafts_in_turn and link is not None and link.worker.has_work:
            self._do(link.worker.step)
            # The target commits a token per step, so with one draft token per turn a proposal would never reach its
            # depth. The turn ends after the draft timeout at the latest, because sequences may have many tokens to
            # compute.
            deadline = self._keeper.now() + self._speculation.draft_timeout_seconds
            while self._link is link and link.worker.is_drafting and self._keeper.now() < deadline:
                self._do(link.worker.step)

    def readings(self) -> Iterator[Reading]:
        yield from super().readings()
        # The names differ from those of the target's KV cache, which are on the same page.
        blocks, used = self._drafter.num_blocks, self._drafter.num_used_blocks
        yield Reading("outrider_draft_kv_blocks", "KV blocks of the drafter in this process.", blocks)
        yield Reading("outrider_draft_kv_blocks_used", "Used KV blocks of the drafter in this process.", used)
        yield from self._worker.readings()

    def _begin(self) -> DraftWorker:
        """Starts the drafter without sequences, and reports its link as up."""
        is_ready = threading.Event()
        worker = DraftWorker(
            self._drafter,
            self._speculation.num_run_ahead_branches,
            tunes_temperature=self._speculation.tunes_draft_temperature,
            clock=self._keeper.now,
            prepare_thread=partial(_compute_with, self._num_threads, is_ready),
        )
        self._link = InProcessLink(worker, self._model, self._events.put, self._take_in, self._keeper.now)
        self._up_at = time.monotonic()
        self._events.put(LinkEvent(self._link, LinkState.UP))
        if not self.drafts_in_turn:
            with _keeping_threads():
                worker.start()
                is_ready.wait()
        return worker

    def _watch(self) -> None:
        """Handles a failure of the drafter's own thread, and restarts the drafter after the pause."""
        if self._link is None:
            if time.monotonic() >= self._retry_at:
                self._worker = self._begin()
        elif self._worker.error is not None:
            self._fail(self._link, self._worker.error)

    def _draft(self, timeout: float) -> None:
        """Drafts until an event has happened, at most `timeout` seconds."""
        deadline = self._keeper.now() + timeout
        while self._link is not None and self._events.empty():
            if self._keeper.now() >= deadline:
                return
            if not self._link.worker.has_work:
                self._keeper.sleep_until(deadline)  # nothing was requested
                return
            self._do(self._link.worker.step)

    def _take_in(self) -> None:
        """Releases ended sequences at once, because the next step may come much later."""
        if self.drafts_in_turn and self._link is not None:
            self._do(self._link.worker.take_in)

    def _do(self, work: Callable[[], None]) -> None:
        """Runs `work`, a part of the drafter's work, in the engine's thread."""
        assert self._link is not None
        started_at = time.thread_time()
        try:
            with _keeping_threads():
                if self._num_threads is not None:
                    torch.set_num_threads(self._num_threads)
                work()
        except Exception as error:
            self._fail(self._link, error)
        self.drafting_seconds += time.thread_time() - started_at

    def _fail(self, link: InProcessLink, error: BaseException) -> None:
        self._link = None
        self._events.put(LinkEvent(link, LinkState.DOWN))
        if time.monotonic() >= self._up_at + _STABLE_SECONDS:
            self._backoff.succeeded()
        pause = self._backoff.failed(_MAX_PAUSE_SECONDS)
        logger.error("the drafter failed; sequences decode plainly for %.1f s", pause, exc_info=error)
        try:
            link.worker.release_all()
        except Exception:
            pause = math.inf
            logger.exception("the drafter cannot be restarted: restart the target to have drafts again")
        self._retry_at = time.monotonic() + pause


def _compute_with(num_threads: int | None, is_ready: threading.Event) -> None:
    """Makes the current thread compute with `num_threads` threads; None: with the default number."""
    try:
        # A thread's first read of its number sets the process's number, so it must come before the number is set here.
        torch.get_num_threads()
        if num_threads is not None:
            torch.set_num_threads(num_threads)
    finally:
        is_ready.set()  # the waiting caller checks whether the thread failed


@contextlib.contextmanager
def _keeping_threads() -> Iterator[None]:
    """Restores the number of compute threads on exit, for this thread and for threads that start later.

    A thread that sets its own number also sets the default of threads that start later.
    """
    num_threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
