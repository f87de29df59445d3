"""What more threads than cores cost a target, told by steps that are computed with one a core."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from cluster.telemetry.metrics import Reading, StepTime

_CYCLE = 64  # steps
_TRIED = 8  # of them: few enough to leave the target as it was asked to be, and in a row


class ThreadTrial:
    """Some steps of every `_CYCLE` have `num_cores` threads, beside the others under the same load."""

    def __init__(
        self, kinds: Iterable[str], num_threads: int, num_cores: int, set_num_threads: Callable[[int], object]
    ) -> None:
        """`kinds` of steps; `set_num_threads` acts on the thread that calls it, which is that of the steps."""
        self._num_threads = num_threads
        self._num_cores = num_cores
        self._set_num_threads = set_num_threads
        self._num_steps = 0
        self._times = {kind: StepTime() for kind in kinds}

    def begin(self) -> None:
        """Before each step."""
        place = self._num_steps % _CYCLE
        self._num_steps += 1
        if place == _CYCLE - _TRIED:
            self._set_num_threads(self._num_cores)
        elif place == 0 and self._num_steps > 1:
            self._set_num_threads(self._num_threads)

    def add(self, kind: str, seconds: float) -> None:
        """The step took so long. The first after a change of threads is not counted: it waits for some to end."""
        if (self._num_steps - 1) % _CYCLE > _CYCLE - _TRIED:
            self._times[kind].add(seconds)

    def readings(self) -> Iterator[Reading]:
        what = "Steps that were computed with one thread a core, where there are more"
        for kind, step_time in self._times.items():
            yield from step_time.readings("outrider_fitting_step", what, kind=kind)
