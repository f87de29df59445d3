"""Virtual time: clocks that only move when someone sleeps, and the order in which several clocks go on.

Each target of a cluster has a clock and runs its real step loop in a thread. Only one thread runs at a time: the one
whose clock is behind. Wherever a step loop would let time pass (the end of a step, a wait for proposals) it says when
it would go on at the latest, and hands over while another target, a draft worker or an event of the traffic comes
before that. So nothing is ever done at a time while something can still happen before it, and no message can arrive in
the past: a message is sent at its sender's clock, which is the earliest of all while it is sent.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections.abc import Callable, Sequence

NEVER = math.inf


class VirtualTime:
    """A `Timekeeper` that does not wait. Other clocks do not exist for it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def sleep_until(self, deadline: float) -> None:
        self.seconds = max(self.seconds, deadline)

    def let_others(self, due_at: Callable[[], float]) -> None:
        """Returns once nothing else in the cluster comes before `due_at()`, which may move meanwhile."""


class TargetTime(VirtualTime):
    """The clock of one of several targets; `turns` knows the others."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self.due_at: Callable[[], float] = self.now
        self.turn = threading.Semaphore(0)
        self._turns = turns

    def sleep_until(self, deadline: float) -> None:
        self.let_others(lambda: deadline)
        super().sleep_until(deadline)

    def let_others(self, due_at: Callable[[], float]) -> None:
        self.due_at = due_at
        self._turns.wait(self)


class Over(BaseException):
    """Ends the step loops when the run is over. Not an Exception, so that no handler in a step loop takes it."""


class Turns:
    """The order of several targets' clocks and of single events. `run` once."""

    def __init__(self) -> None:
        self.clocks: list[TargetTime] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._over = threading.Event()
        self._error: BaseException | None = None

    def new_clock(self) -> TargetTime:
        self.clocks.append(TargetTime(self))
        return self.clocks[-1]

    def at(self, seconds: float, event: Callable[[], None]) -> None:
        """Calls `event` at that time, before anything else that happens then; it ends the run by raising Over."""
        heapq.heappush(self._events, (seconds, next(self._numbers), event))

    def run(self, loops: Sequence[Callable[[], None]]) -> None:
        """Runs `loops[i]` with clock i, until nothing is left to happen or an event ends it; raises what they raise."""
        threads = [
            threading.Thread(target=self._run, args=(clock, loop), name="virtual target", daemon=True)
            for clock, loop in zip(self.clocks, loops, strict=True)
        ]
        for thread in threads:
            thread.start()
        self.clocks[0].turn.release()
        try:
            self._over.wait()
        finally:
            self._over.set()
            for clock in self.clocks:
                clock.turn.release()
            for thread in threads:
                thread.join()
        if self._error is not None:
            raise self._error

    def wait(self, own: TargetTime) -> None:
        """Returns when the turn of `own` has come."""
        while not self._over.is_set():
            due_at = own.due_at()
            first = min(self.clocks, key=_due_at) if len(self.clocks) > 1 else own
            first_at = due_at if first is own else first.due_at()
            if self._events and self._events[0][0] <= min(due_at, first_at):
                heapq.heappop(self._events)[2]()
            elif first_at < due_at:
                first.turn.release()
                own.turn.acquire()
            elif due_at == NEVER:
                break
            else:
                return
        raise Over

    def _run(self, clock: TargetTime, loop: Callable[[], None]) -> None:
        clock.turn.acquire()
        try:
            loop()
        except Over:
            pass
        except BaseException as error:
            self._error = error
        self._over.set()


def _due_at(clock: TargetTime) -> float:
    return clock.due_at()
