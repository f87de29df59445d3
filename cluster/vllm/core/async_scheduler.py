"""Rounds for vLLM's asynchronous scheduler: a step is scheduled and submitted while the previous step runs.

Steps without drafts, and steps whose drafts the runner makes itself (`device_rounds`), run as in vLLM and never wait
for the host. A step with drafts of draft workers is *bound*. The scheduler plans the number of rows for each sequence
when it schedules the step. It collects the drafts later, after it has processed the output of the previous step and
sent it to the drafters. Meanwhile the step is queued on the device, behind a gate (`draft_gate`).
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from cluster.telemetry.metrics import Reading
from cluster.vllm.core.device_rounds import DeviceRounds
from cluster.vllm.core.scheduler import RoundScheduler
from cluster.vllm.draft_gate import BOUND_STEP, BoundStep, DraftGate

logger = logging.getLogger(__name__)

_STUCK_SECONDS = 1.0  # seconds after its submission when a step runs without drafts; nearly all steps take less


@dataclass(slots=True)
class _Submitted:
    """A step whose output has not been processed."""

    decoding: Sequence[Request]
    bound: BoundStep | None
    num_drafts: Mapping[str, int]  # rows for drafts, by request ID
    leaves_prompts: bool  # `EngineStep.left_prompts`
    began_at: float = 0.0  # when the gate was opened for the step; without a gate, when the step was scheduled
    drafts: dict[str, Sequence[int]] = field(default_factory=dict)
    submitted_at: float = field(default_factory=time.monotonic)


class AsyncRoundScheduler(RoundScheduler, AsyncScheduler):
    """`RoundScheduler` for vLLM's V2 runner."""

    plans_early = True
    couples_drafts = True  # whether the runner's speculator is ours (`cluster.vllm_plugin.registration`)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._planned: Sequence[Request] = ()  # requests that decode in the next step, after an earlier end of prompt
        self._submitted: deque[_Submitted] = deque()
        self._landing: _Submitted | None = None  # the step whose output is being processed
        self._landed_at = 0.0
        self._next_depth = 0  # drafts that the runner makes in the step being scheduled
        self.num_without_drafts = 0  # steps whose gate stayed closed for too long
        # From 0.33 on, vLLM would reduce the depth of some steps to 0. `DeviceRounds` expects the depth that it chose.
        self.can_skip_drafts = False
        self._gate: DraftGate | None = None
        if self.max_drafts:
            self._gate = DraftGate(self.max_num_running_reqs, self.max_drafts)
            threading.Thread(target=self._watch_gate, name="draft-gate", daemon=True).start()

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        output = super().schedule(throttle_prefills)
        scheduled = output.num_scheduled_tokens
        num_drafts = {name: len(drafts) for name, drafts in output.scheduled_spec_decode_tokens.items()}
        bound = None
        if num_drafts and self._gate is not None and self._device_rounds is None:
            bound = self._gate.bind(list(num_drafts))
            setattr(output, BOUND_STEP, bound)
        decoding = [request for request in self._planned if request.request_id in scheduled]
        step = _Submitted(decoding, bound, num_drafts, self._leaves_prompts, began_at=self._scheduled_at)
        self._submitted.append(step)
        if len(self._submitted) == 1:
            self._collect(step)
        elif self.needs_masks(output):
            # vLLM samples this step's tokens after the previous step has ended, and only then asks for the masks.
            output.pending_structured_output_tokens = True
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        self._landing = self._submitted.popleft()
        self._leaves_prompts = self._landing.leaves_prompts
        if self._device_rounds is None:  # otherwise vLLM's metrics would count rows without a draft
            scheduler_output.num_invalid_spec_tokens = {
                name: number - len(self._landing.drafts.get(name, ()))
                for name, number in self._landing.num_drafts.items()
            }
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._landed_at = self.clock()
        if self._submitted:
            self._collect(self._submitted[0])
        return outputs

    def needs_masks(self, scheduler_output: SchedulerOutput) -> bool:
        """Returns True if a request that chooses a token in the step has a grammar."""
        return bool(scheduler_output.has_structured_output_requests)

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Returns the masks of vLLM's grammars. Called after the step's drafts were collected."""
        rows = scheduler_output.scheduled_spec_decode_tokens
        for request_id, placeholders in rows.items():
            request = self.requests.get(request_id)
            if request is not None and request.use_structured_output:
                drafts = self.drafts_in_flight(request)
                rows[request_id] = [*drafts, *placeholders[len(drafts) :]]
        return super().get_grammar_bitmask(scheduler_output)

    def update_draft_token_ids_in_output(
        self, draft_token_ids: DraftTokenIds, scheduler_output: SchedulerOutput
    ) -> None:
        """Does nothing: the host has the drafts already, or the runner verifies its own."""

    def drafts(self, request: Request, proposed: Sequence[int], most: int) -> Sequence[int]:
        """Returns the drafts that the request's grammar, if it has one, allows."""
        allowed: list[int] = self.structured_output_manager.validate_tokens(request, list(proposed[:most]))
        return allowed

    def readings(self) -> Iterator[Reading]:
        description = "Steps that waited over a second for their drafts, and ran without them."
        yield Reading("outrider_steps_without_drafts", description, self.num_without_drafts, is_counter=True)

    @property
    def _device_rounds(self) -> DeviceRounds | None:
        """The rounds, if the runner drafts; otherwise None."""
        return self.rounds if isinstance(self.rounds, DeviceRounds) else None

    def drafts_in_flight(self, request: Request) -> Sequence[int]:
        """Returns the drafts of `request` in the last submitted step; empty until they are collected."""
        return self._submitted[-1].drafts.get(request.request_id, ())

    def shutdown(self) -> None:
        for step in list(self._submitted):
            self._open(step, None)
        super().shutdown()

    def _set_drafts(self) -> set[str]:
        if self.rounds is None:
            return set()
        self._planned, joining = self._running()
        if (rounds := self._device_rounds) is not None:
            room = max(0, self.max_num_running_reqs - len(self.running))
            self._next_depth = rounds.next_depth([*self.running, *itertools.islice(self.waiting, room)])
        depths = self.rounds.plan(self._planned, joining)
        if depths:
            drafts = {r.request_id: [-1] * depths.get(r.request_id, 0) for r in self._planned}
            self._place(self._planned, drafts, joining)
        return set()

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        if (rounds := self._device_rounds) is not None:
            scheduler_output.num_spec_tokens_to_schedule = self._next_depth
            rounds.ran([self.requests[name] for name in scheduler_output.num_scheduled_tokens], self._next_depth)

    def _collect(self, step: _Submitted) -> None:
        """Collects the drafts of `step` and opens its gate. All earlier steps must have ended."""
        try:
            if self.rounds is not None and self._device_rounds is None:
                decoding = [request for request in step.decoding if request.status == RequestStatus.RUNNING]
                drafts = self.rounds.collect(decoding) or {}
                for request in decoding:
                    number = step.num_drafts.get(request.request_id, 0)
                    step.drafts[request.request_id] = self.drafts(request, drafts.get(request.request_id, ()), number)
        finally:
            if step.bound is not None:
                if not self._open(step, [step.drafts.get(name, ()) for name in step.bound.request_ids]):
                    step.drafts.clear()
                step.began_at = self.clock()

    def _step_began_at(self) -> float:
        assert self._landing is not None
        return max(self._landing.began_at, self._landed_at)

    def _verified_drafts(self, scheduler_output: SchedulerOutput, output: EngineCoreOutput) -> Sequence[int]:
        if self._device_rounds is not None:  # the host only has the accepted drafts
            rows = len(scheduler_output.scheduled_spec_decode_tokens.get(output.request_id, ()))
            accepted = output.new_token_ids[:-1]
            return [*accepted, *[-1] * (rows - len(accepted))]
        assert self._landing is not None
        return self._landing.drafts.get(output.request_id, ())

    def _open(self, step: _Submitted, drafts: Sequence[Sequence[int]] | None) -> bool:
        """Opens the gate of `step` with `drafts`. Returns True if the step is bound and its gate was still closed."""
        return step.bound is not None and self._gate is not None and self._gate.open(step.bound, drafts)

    def _watch_gate(self) -> None:
        """Opens gates that stay closed for too long, so that host and device cannot wait for each other forever."""
        while True:
            time.sleep(_STUCK_SECONDS / 4)
            for step in list(self._submitted):
                if time.monotonic() > step.submitted_at + _STUCK_SECONDS and self._open(step, None):
                    self.num_without_drafts += 1
                    logger.debug("a step of %d sequences ran without its drafts", len(step.decoding))
