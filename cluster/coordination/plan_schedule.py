"""When depths are chosen anew."""

from __future__ import annotations

from collections.abc import Callable

_STEPS_A_PLAN = 16  # depths change slowly, and choosing them takes as long as some hundred other lines
_PLANS_A_STEP_MORE = 2  # of what is new all is learned in its first rounds: plans begin at every step and grow rarer
_PLAN_SECONDS = 1.0  # where steps are slow, what a plan takes is little beside them
_SEQUENCES_A_STEP = 16  # the more sequences, the rarer: a plan's cost stays the same share of a step's


class PlanSchedule:
    """Of one target. A plan is due after some steps, and when the load is another, as what pays for one sequence can
    cost a step of 64 four times its time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.num_planned_rows = 0  # sequences of the step that was last planned for
        self._clock = clock
        self._num_steps_left = 0.0
        self._num_plans = 0  # since something new came: another draft model, another temperature
        self._plan_at = clock()

    def begin_anew(self) -> None:
        """Something new came."""
        self._num_plans = 0

    def joined(self, count: int = 1) -> None:
        """Sequences take part from now on. One among few is planned for at once, as nothing that was chosen for others
        is its own."""
        self._num_steps_left -= count * (_STEPS_A_PLAN / max(1, self.num_planned_rows))

    def is_due(self, num_rows: int) -> bool:
        """Whether there should be a plan before the next step, which has `num_rows` sequences; asked once a step."""
        self._num_steps_left -= 1
        if self._num_steps_left <= 0 or self._clock() >= self._plan_at:
            return True
        return not num_rows <= 2 * self.num_planned_rows <= 4 * num_rows

    def planned(self, num_rows: int) -> None:
        """There was one, for so many sequences."""
        self._num_plans += 1
        self._num_steps_left = min(
            max(_STEPS_A_PLAN, num_rows // _SEQUENCES_A_STEP), 1 + self._num_plans // _PLANS_A_STEP_MORE
        )
        self._plan_at = self._clock() + _PLAN_SECONDS
        self.num_planned_rows = num_rows
