"""A target without a model, for load, fault and planning runs: its steps take a set time, its tokens are a hash."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from cluster.config import SimulationConfig, SpeculationConfig
from cluster.coordination.pool import DraftPool
from cluster.engine.blocks import BlockManager
from cluster.engine.scheduler import ScheduledSequence
from cluster.simulation.steps import StepCurve, sleep_until
from cluster.simulation.tokens import token_at
from cluster.speculation.drafts import depths_of
from cluster.targets.base import GenerationRequest
from cluster.targets.step_loop import StepLoop


class SimulatedTarget(StepLoop):
    """Schedules, keeps blocks and runs rounds as any target does; only the forward pass and the sampling are not real.

    The token at a position is a function of the noise key and the position alone, and no token ends a sequence.
    """

    def __init__(
        self,
        simulation: SimulationConfig,
        blocks: BlockManager,
        pool: DraftPool,
        speculation: SpeculationConfig,
        *,
        vocab_size: int,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        super().__init__(
            blocks,
            pool,
            speculation,
            name="simulated",
            dtype="simulated",
            vocab_size=vocab_size,
            eos_token_ids=(),
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        self._curve = StepCurve(simulation.target_step_ms)
        self._sequence_seconds = simulation.target_sequence_ms / 1e3

    def _choose(self, step: Sequence[tuple[ScheduledSequence, GenerationRequest]]) -> list[int]:
        started_at = time.perf_counter()
        choices = [
            token_at(request.noise_key, position, self.vocab_size)
            for scheduled, request in step
            if scheduled.yields_choices
            for position in _positions(scheduled)
        ]
        num_rows = sum(scheduled.num_new_tokens + len(scheduled.drafts) for scheduled, _ in step)
        sleep_until(started_at + self._curve.at(num_rows) + self._sequence_seconds * len(step))
        return choices

    def _keep(self, block_table: Sequence[int], start: int, nodes: Sequence[int]) -> None:
        """There is no KV."""

    def _time_step(self, num_rows: int) -> float | None:
        return self._curve.at(num_rows) + self._sequence_seconds


def _positions(scheduled: ScheduledSequence) -> Iterator[int]:
    """Of the tokens that are chosen: after the last committed one, and after every draft."""
    start, parents = len(scheduled.sequence.token_ids), scheduled.drafts.parents
    yield start
    depths = range(1, len(scheduled.drafts) + 1) if parents is None else depths_of(parents)
    yield from (start + depth for depth in depths)
