"""Virtual time: clocks that only advance when their owner sleeps, and the order in which several clocks continue.

Each target of a cluster has a clock and runs its real step loop in its own thread. One thread runs at a time. When a
step loop lets time pass (a step, a wait for proposals), it sets the time at which it is due, and lets the target run
that is due first. Three rules guarantee causality:

- A target that sleeps is due at the end of its sleep. A target that polls its links is due when the poll ends, when the
  first message arrives, or when one of its draft workers takes a turn, whichever is first. Turns of other targets may
  change this time, so it is computed again whenever another thread has run.
- A target continues, and lets a draft worker take a turn, only if no other target and no event of the traffic is due
  earlier. All clocks have then reached this time, so every message that can arrive by this time has been sent.
- The clock of a message's sender is the earliest of all clocks, and no transfer takes negative time. So a message never
  arrives before a turn that its draft worker has already taken (`drafts` asserts this).

At equal times events come first, then the running thread, then the other targets by number.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections.abc import Callable, Sequence

NEVER = math.inf


class VirtualTime:
    """A `Timekeeper` that does not wait, and the only clock of its cluster."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def sleep_until(self, deadline: float) -> None:
        self.seconds = max(self.seconds, deadline)

    def let_others(self, due_at: Callable[[], float]) -> None:
        """Returns once nothing else in the cluster is due before `due_at()`. The result of `due_at` may change."""


class TargetTime(VirtualTime):
    """Clock of one of several targets. `Turns` determines the order in which they continue."""

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
    """Ends the step loops when the run is over. Not an Exception, so that handlers in the step loops ignore it."""


class Turns:
    """Runs several targets' step loops and single events in the order of their times. `run` may be called once."""

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
        """Schedules `event` before all targets that are due at that time. If `event` raises Over, the run ends."""
        heapq.heappush(self._events, (seconds, next(self._numbers), event))

    def run(self, loops: Sequence[Callable[[], None]]) -> None:
        """Runs `loops[i]` with clock i until nothing is due or an event ends the run. Raises their exceptions."""
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
        """Returns when `own` is due first. Raises Over when the run has ended."""
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
