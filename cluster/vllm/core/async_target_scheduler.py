"""`core.CoordinatedScheduler` for vLLM's V2 runner, which is scheduled asynchronously."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.request import Request

from cluster.speculation.drafts import Drafts
from cluster.vllm.constraints import is_constrained
from cluster.vllm.core.async_scheduler import AsyncRoundScheduler
from cluster.vllm.core.target_scheduler import CoordinatedScheduler
from cluster.vllm.coupling import Coupling


class AsyncCoordinatedScheduler(CoordinatedScheduler, AsyncRoundScheduler):
    """Scheduler class that vLLM loads as its `scheduler_cls`."""

    def schedule(self, throttle_prefills: bool = False) -> Any:
        output = super().schedule(throttle_prefills)
        for new in output.scheduled_new_reqs:
            coupling = Coupling.of(new.sampling_params)
            if coupling is not None and coupling.params.has_penalty:
                # For penalties the runner counts all tokens after the prompt as generated. Tokens that another worker
                # generated must count too, so they must not be part of the prompt.
                new.prompt_token_ids = new.prompt_token_ids[: coupling.num_prompt_tokens]
        return output

    def needs_masks(self, scheduler_output: SchedulerOutput) -> bool:
        return any(self._constrained(scheduler_output))

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Returns the masks of the step's constrained requests; None if no request has a mask.

        A mask contains the tokens that the request's constraints allow. Each request gets 1 + `max_drafts` rows,
        because vLLM computes the first row of a request from the request's index in the list.
        """
        request_ids, masks, num_drafts = [], [], []
        for request in self._constrained(scheduler_output):
            constraint = self._constraint(request)
            assert constraint is not None
            drafts = self.drafts_in_flight(request)
            found = constraint.masks(Drafts(drafts))
            if found is not None:
                # Rows after the drafts allow all tokens.
                rows = np.full((1 + self.max_drafts, found.shape[1]), -1, dtype=np.int32)
                rows[: len(found)] = found.numpy()
                request_ids.append(request.request_id)
                masks.append(rows)
                num_drafts.append(len(drafts))
        return GrammarOutput(request_ids, np.concatenate(masks), num_drafts) if masks else None

    def _constrained(self, scheduler_output: SchedulerOutput) -> Iterator[Request]:
        """Yields the requests with constraints that choose a token in this step."""
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is not None and not request.is_prefill_chunk and is_constrained(request.sampling_params):
                yield request
