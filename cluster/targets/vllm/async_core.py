"""`core.CoordinatedScheduler` for vLLM's V2 runner, which is scheduled asynchronously."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cluster.targets.base import TargetLoad
from cluster.targets.vllm.core import CoordinatedScheduler
from cluster.telemetry.metrics import Reading
from cluster.vllm.async_scheduler import AsyncRoundScheduler
from cluster.vllm.coupling import Coupling


class AsyncCoordinatedScheduler(CoordinatedScheduler, AsyncRoundScheduler):
    """Named to vLLM as its `scheduler_cls`."""

    def schedule(self, throttle_prefills: bool = False) -> Any:
        output = super().schedule(throttle_prefills)
        for new in output.scheduled_new_reqs:
            coupling = Coupling.of(new.sampling_params.extra_args)
            if coupling is not None and coupling.params.has_penalty:
                # The runner counts as generated what follows the prompt: tokens of another worker do, too.
                new.prompt_token_ids = new.prompt_token_ids[: coupling.num_prompt_tokens]
        return output

    def _readings(self, load: TargetLoad) -> Iterator[Reading]:
        yield from super()._readings(load)
        told = "Steps that went on without drafts, as these took too long or the device could not be waited for."
        yield Reading("outrider_steps_without_drafts", told, self.num_without_drafts, is_counter=True)
