"""Simulated engines that add the programs' own time to their steps and report each step to the recorder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cluster.coordination.coordinator import StepTiming
from cluster.drafters.base import DraftSequence
from cluster.drafters.simulated import SimulatedDrafter
from cluster.engine.prompt_pace import PromptPart
from cluster.planning.overheads import NO_OVERHEADS, Overheads
from cluster.simulator.figures import StepFigures
from cluster.targets.simulated import SimulatedTarget
from cluster.targets.step_loop import ReadChoices
from cluster.targets.token_generator import Scheduled


class RecordedTarget(SimulatedTarget):
    """Target that stores its `last_step`; None if the last turn of its loop computed nothing."""

    def __init__(self, *arguments: Any, overheads: Overheads) -> None:
        super().__init__(*arguments)
        self.last_step: StepFigures | None = None
        self.most_used_blocks = 0
        self._overheads = overheads
        self._waited_before = 0.0

    @property
    def num_preemptions(self) -> int:
        return self._scheduler.num_preemptions

    @property
    def num_used_blocks(self) -> int:
        return self._blocks.num_used_blocks

    def _launch(self, step: Sequence[Scheduled]) -> ReadChoices:
        self.most_used_blocks = max(self.most_used_blocks, self._blocks.num_used_blocks)
        self._keeper.sleep_until(self._keeper.now() + self._overheads.seconds(len(step)))
        return super()._launch(step)

    def _time(
        self, step: Sequence[Scheduled], prompts: Sequence[PromptPart], num_rows: int, seconds: float
    ) -> StepTiming:
        seconds -= self._overheads.seconds(len(step))  # real engines do not count overheads as part of a step
        waited = self._coordinator.stats.wait_seconds
        num_step_rows = sum([scheduled.num_new_tokens + len(scheduled.drafts.token_ids) for scheduled in step])
        self.last_step = StepFigures(seconds, waited - self._waited_before, num_step_rows, len(self._scheduler.waiting))
        self._waited_before = waited
        return super()._time(step, prompts, num_rows, seconds)


class RecordedDrafter(SimulatedDrafter):
    """Drafter that calls `drafted(now, seconds, num_sequences)` after each step."""

    def __init__(
        self, *arguments: Any, drafted: Callable[[float, float, int], None], overheads: Overheads = NO_OVERHEADS
    ) -> None:
        """Adds `overheads` before each step; a `VirtualDraft` adds its own instead."""
        super().__init__(*arguments)
        self._drafted = drafted
        self._overheads = overheads

    def draft(self, sequences: Sequence[DraftSequence]) -> list[DraftSequence]:
        self._time.sleep_until(self._time.now() + self._overheads.seconds(len(sequences)))
        started_at = self._time.now()
        stuck = super().draft(sequences)
        self._drafted(self._time.now(), self._time.now() - started_at, len(sequences))
        return stuck
