"""vLLM's scheduler with a pool of draft workers, for the target worker and for the plugin for `vllm serve`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cluster.config.speculation import SpeculationConfig
from cluster.coordination.pool import DraftPool
from cluster.engine.limits import StepLimits
from cluster.interpreter import switch_threads_soon
from cluster.telemetry.metrics import Reading, StepTime
from cluster.vllm.core.scheduler import EngineStep, RoundScheduler
from cluster.vllm.core.scheduler_rounds import CoordinatedRounds, Links


class PoolScheduler(RoundScheduler):
    """`RoundScheduler` with links to draft workers. Subclasses call `connect` and set `rounds`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        switch_threads_soon()
        self.step_times = {kind: StepTime() for kind in ("prefill", "verify", "decode")}

    def connect(
        self, new_pool: Callable[[], DraftPool], speculation: SpeculationConfig, addresses: Sequence[str] = ()
    ) -> None:
        """Starts the links. `addresses`: addresses of the draft workers; if empty, `Links.follow` sets them later."""
        self.links = Links(new_pool, addresses)
        self._speculation = speculation

    def coordinated_rounds(self, step_times: Sequence[tuple[int, float]] = ()) -> CoordinatedRounds:
        """Returns new rounds over the links. `step_times`: measured pairs of rows and seconds."""
        limits = StepLimits(
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_running_reqs,
            max_num_batched_tokens=self.max_num_scheduled_tokens,
        )
        vocab_size = self.vllm_config.model_config.get_vocab_size()
        return CoordinatedRounds(
            self.links, self._speculation, vocab_size, limits, step_times, reserves_rows=self.plans_early
        )

    def stepped(self, step: EngineStep) -> None:
        if step.rounds:
            has_drafts = any(committed.draft_token_ids for committed in step.rounds)
            self.step_times[StepTime.kind(has_prompt=bool(step.prompts), has_drafts=has_drafts)].add(step.seconds)

    def readings(self) -> Iterator[Reading]:
        yield from super().readings()
        for kind, step_time in self.step_times.items():
            yield from step_time.readings("outrider_step", "Steps of the engine", kind=kind)
        if isinstance(self.rounds, CoordinatedRounds):
            yield from self.rounds.readings()
            yield from self.links.pool.readings()
