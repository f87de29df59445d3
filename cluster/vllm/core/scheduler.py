"""vLLM's scheduler with rounds: draft workers make the drafts, and the scheduler sets them when it schedules a step.

The scheduler runs only in the engine core's process, not on the tensor-parallel ranks.
"""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from vllm.config.lora import LoRAConfig
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request

from cluster.engine.prompt_pace import PromptPace, PromptPart
from cluster.logprobs import TokenLogprobs
from cluster.speculation.drafts import num_useful_drafts
from cluster.targets.base import TargetLoad
from cluster.telemetry.metrics import Reading


@dataclass(frozen=True, slots=True)
class CommittedRound:
    """Result of one step for one request."""

    request: Request
    draft_token_ids: Sequence[int]  # drafts that were verified
    token_ids: Sequence[int]  # committed tokens, up to the request's end
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None = None  # log-probabilities of `token_ids`, if requested
    prompt_logprobs: TokenLogprobs | None = None  # log-probabilities of the prompt, beginning with its second token

    @property
    def num_accepted(self) -> int:
        """Number of drafts among the committed tokens."""
        num_accepted = 0
        for draft, token in zip(self.draft_token_ids, self.token_ids, strict=False):
            if draft != token:
                break
            num_accepted += 1
        return num_accepted


@dataclass(frozen=True, slots=True)
class EngineStep:
    """A step that has run."""

    rounds: Sequence[CommittedRound]
    num_rows: int  # rows that yielded a token
    num_tokens: int  # tokens that the step computed, drafts included
    seconds: float
    prompts: Sequence[PromptPart]  # parts of prompts that the step computed
    left_prompts: bool  # whether prompt tokens had to wait because the step had no room


class Rounds:
    """Interface of the rounds, without drafts. Methods are called from the engine core's thread and must not raise."""

    @property
    def spare_seconds(self) -> float:
        """Time that prompts may add to a step within the limits of the last plan."""
        return math.inf

    def plan(self, decoding: Sequence[Request], joining: Sequence[Request]) -> Mapping[str, int] | None:
        """Returns the maximum number of drafts in the next step for each of `decoding`, by request ID.

        Returns None if rounds are off.
        """
        return {}

    def collect(self, decoding: Sequence[Request]) -> Mapping[str, Sequence[int]] | None:
        """Waits for the drafts of the planned step, and returns them by request ID. Returns None if rounds are off.

        If the step is not scheduled yet, requests without an entry are left out of it.
        """
        return {}

    def scheduled(self, joining: Sequence[Request]) -> None:
        """Called before the step runs. The step computes prompts of `joining`, which will decode in later steps."""

    def end(self, step: EngineStep) -> None: ...

    def close(self, request: Request) -> None:
        """Called when the request has finished or was aborted."""


class RoundScheduler(Scheduler):
    """vLLM's scheduler with rounds. A subclass may set `rounds`; with None, vLLM drafts by itself or not at all."""

    rounds: Rounds | None = None
    plans_early: ClassVar = False  # True: a step is scheduled before its drafts are collected
    clock: Callable[[], float] = staticmethod(time.perf_counter)  # in seconds
    running: list[Request]
    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.max_drafts = int(self.num_spec_tokens)  # maximum drafts of a request in a step
        self.num_preemptions = 0
        self.num_queried_tokens = 0  # tokens of admitted requests
        self.num_hit_tokens = 0  # tokens of admitted requests that were in the prefix cache
        self.pace = PromptPace(None, self.max_num_scheduled_tokens)
        self._scheduled_at = 0.0
        self._held_back: list[Request] = []  # running requests that vLLM does not see while it schedules
        self._leaves_prompts = False  # `EngineStep.left_prompts` of the step being scheduled

    def load(self) -> TargetLoad:
        """Returns the engine's load, without draft workers. Thread-safe."""
        num_running, num_waiting = self.get_request_counts()
        pool = self.kv_cache_manager.block_pool
        num_blocks = pool.num_gpu_blocks - 1  # vLLM never uses one of them
        num_used_blocks = num_blocks - pool.get_num_free_blocks()
        num_waiting_tokens = sum(request.num_tokens for request in [*self.waiting, *self.kv_holding_waiting])
        return TargetLoad(num_running, num_waiting, num_used_blocks, num_blocks, num_waiting_tokens=num_waiting_tokens)

    def readings(self) -> Iterator[Reading]:
        """Yields metrics of the scheduler. Thread-safe."""
        yield from ()

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        with self._prompts_in_turn(self._set_drafts()) as held_back:
            return self._schedule(held_back, throttle_prefills)

    def _schedule(self, held_back: set[str], throttle_prefills: bool) -> SchedulerOutput:
        running: list[Request] = self.running
        if held_back:
            self._held_back = [request for request in running if request.request_id in held_back]
            self.running = [request for request in running if request.request_id not in held_back]
            self.max_num_running_reqs -= len(held_back)
            self.max_num_active_reqs -= len(held_back)
            self.lora_config = self._without_slots_of(held_back, running)
        if self.rounds is not None:
            self.num_spec_tokens = 0  # otherwise vLLM could pad the first step of a request with placeholder drafts
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self.num_spec_tokens = self.max_drafts
            if held_back:
                self.max_num_running_reqs += len(held_back)
                self.max_num_active_reqs += len(held_back)
                self.running = _with_held_back(running, held_back, self.running)
                self._held_back = []
                self.lora_config = self.vllm_config.lora_config
        self._leaves_prompts = self._left_prompts(output.total_num_scheduled_tokens)
        self.num_preemptions += len(output.preempted_req_ids or ())
        for new in self.admitted(output):
            self.num_queried_tokens += len(new.prompt_token_ids or ())
            self.num_hit_tokens += new.num_computed_tokens
        if self.rounds is not None:
            joining = {new.req_id for new in output.scheduled_new_reqs} | output.scheduled_cached_reqs.resumed_req_ids
            self.rounds.scheduled([r for r in self.running if r.is_prefill_chunk or r.request_id in joining])
        self._scheduled_at = self.clock()
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        seconds = self.clock() - self._step_began_at()
        # Look the requests up first, because `update_from_output` removes finished requests.
        requests = {request_id: self.requests.get(request_id) for request_id in scheduler_output.num_scheduled_tokens}
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        rounds, num_rows, num_drafts_of = [], 0, scheduler_output.scheduled_spec_decode_tokens
        for of_client in outputs.values():
            for output in of_client.outputs:
                request = requests.get(output.request_id)
                if request is not None and output.new_token_ids:
                    asked = request.sampling_params
                    num_rows += 1 + len(num_drafts_of.get(output.request_id, ()))
                    rounds.append(
                        CommittedRound(
                            request,
                            self._verified_drafts(scheduler_output, output),
                            output.new_token_ids,
                            output.finish_reason,
                            _logprobs(output.new_logprobs, asked.logprobs),
                            _logprobs(output.new_prompt_logprobs_tensors, asked.prompt_logprobs),
                        )
                    )
        step = EngineStep(
            rounds,
            num_rows=num_rows,
            num_tokens=scheduler_output.total_num_scheduled_tokens,
            seconds=seconds,
            prompts=[
                # A request that was preempted meanwhile has computed nothing.
                PromptPart(num_tokens, max(0, request.num_computed_tokens - request.num_in_flight_tokens - num_tokens))
                for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items()
                if num_tokens > 1 + len(num_drafts_of.get(request_id, ()))
                and (request := requests[request_id]) is not None
            ],
            left_prompts=self._leaves_prompts,
        )
        if scheduler_output.total_num_scheduled_tokens:  # otherwise the step was empty
            self.pace.observe(scheduler_output.total_num_scheduled_tokens, step.prompts, seconds)
        if self.rounds is not None:
            self.rounds.end(step)
        self.stepped(step)
        return outputs

    def stepped(self, step: EngineStep) -> None:
        """Called after each step."""

    def admitted(self, output: SchedulerOutput) -> list[NewRequestData]:
        """Returns the requests that run for the first time. vLLM's V2 runner also lists preempted requests as new."""
        return [new for new in output.scheduled_new_reqs if not self.requests[new.req_id].num_preemptions]

    def _step_began_at(self) -> float:
        """Returns the time at which the step whose output was received began to run."""
        return self._scheduled_at

    def _verified_drafts(self, scheduler_output: SchedulerOutput, output: EngineCoreOutput) -> Sequence[int]:
        """Returns the drafts that a step has verified for the request of `output`."""
        # If vLLM drafts by itself, it pads the first step of a request with -1.
        drafts = scheduler_output.scheduled_spec_decode_tokens.get(output.request_id, ())
        return [draft for draft in drafts if draft >= 0]

    def drafts(self, request: Request, proposed: Sequence[int], most: int) -> Sequence[int]:
        """Returns the drafts among `proposed` to verify, at most `most`."""
        return proposed[:most]

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Stores the drafts of the runner's own proposer; ignores them if there are rounds."""
        if self.rounds is None:
            super().update_draft_token_ids(draft_token_ids)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        """Closes the request in the rounds. vLLM calls this for every request that finishes or is aborted."""
        if self.rounds is not None:
            self.rounds.close(request)
        return super()._free_request(request, delay_free_blocks)

    def _set_drafts(self) -> set[str]:
        """Sets the drafts of the next step. Returns the IDs of the requests that the step leaves out."""
        if self.rounds is None:
            return set()
        decoding, joining = self._running()
        drafts = self.rounds.collect(decoding) if self.rounds.plan(decoding, joining) is not None else None
        if drafts is None:
            return set()
        taking_part = [request for request in decoding if request.request_id in drafts]
        chosen = {
            request.request_id: self.drafts(request, drafts[request.request_id], self._useful_drafts(request))
            for request in taking_part
        }
        if not self._place(taking_part, chosen, joining):
            return set()  # vLLM may preempt the youngest scheduled request, so the step must include all requests
        return {request.request_id for request in decoding if request.request_id not in drafts}

    def _running(self) -> tuple[list[Request], list[Request]]:
        """Returns the running requests that choose a token in the next step, and those that compute a prompt."""
        decoding = [request for request in self.running if not request.is_prefill_chunk]
        return decoding, [request for request in self.running if request.is_prefill_chunk]

    def all_running(self) -> list[Request]:
        """Returns the running requests, also while vLLM schedules and does not see all of them."""
        return [*self.running, *self._held_back]

    @property
    def may_lack_blocks(self) -> bool:
        """True if a step of the largest size could lack blocks, so that vLLM would preempt requests."""
        num_blocks: int = self.kv_cache_manager.block_pool.get_num_free_blocks()
        most: int = len(self.running) + self.max_num_scheduled_tokens // self.block_size
        return num_blocks <= most

    @contextmanager
    def _prompts_in_turn(self, held_back: set[str]) -> Iterator[set[str]]:
        """Limits the prompt tokens of vLLM's step to the budget of `pace`. The limits are restored on exit.

        Yields the IDs of the requests to leave out of the step: `held_back`, and prompts without a share of the budget.
        vLLM serves its running requests in order and has one limit for all, so it cannot skip these itself.
        """
        budget, threshold = self.max_num_scheduled_tokens, self.scheduler_config.long_prefill_token_threshold
        prompts = [request for request in self.running if request.is_prefill_chunk]
        waiting = list(itertools.islice(self.waiting, max(0, self.max_num_running_reqs - len(self.running))))
        if not (prompts or waiting):
            yield held_back
            return
        decoding = [r for r in self.running if not r.is_prefill_chunk and r.request_id not in held_back]
        num_rows = sum(1 + len(request.spec_token_ids) for request in decoding)
        lengths = [request.num_tokens - request.num_computed_tokens for request in [*prompts, *waiting]]
        # vLLM has one limit for all prompts, so each is assumed to cost as much as the one with the longest context.
        furthest = max(request.num_computed_tokens for request in [*prompts, *waiting])
        parts = [PromptPart(length, furthest) for length in lengths]
        if self.rounds is not None:
            self.pace.spare_seconds = self.rounds.spare_seconds
        seconds = self.pace.budget(is_alone=len(lengths) == 1 and not num_rows, prompts=parts, num_rows=num_rows)
        shares = self.pace.share(parts, max(0, budget - num_rows), seconds)
        # vLLM may preempt the youngest scheduled request, so if blocks could run short, the step must include all.
        if not self.may_lack_blocks:
            # vLLM serves running requests before waiting ones, so a partly computed prompt would also get their shares.
            least = [length if any(shares[len(prompts) :]) else 1 for length in lengths]
            held_back = held_back | {
                request.request_id
                for request, tokens, at_least in list(zip(prompts, shares, least, strict=False))[1:]
                if tokens < at_least
            }
        most = max(*shares, 1 + self.max_drafts)
        if prompts and self.may_lack_blocks:  # none is held back, and they may come before others' rows
            most = max(1 + self.max_drafts, min(most, sum(shares) // len(prompts)))
        self.max_num_scheduled_tokens = min(budget, num_rows + sum(shares))
        self.scheduler_config.long_prefill_token_threshold = min(most, threshold) if threshold else most
        try:
            yield held_back
        finally:
            self.max_num_scheduled_tokens = budget
            self.scheduler_config.long_prefill_token_threshold = threshold

    def _left_prompts(self, num_scheduled_tokens: int) -> bool:
        """Returns True if a scheduled step of `num_scheduled_tokens` tokens had no room for all prompt tokens.

        Ignores requests that wait for a slot or for blocks, because some of their tokens may be in the prefix cache.
        """
        if any(request.is_prefill_chunk for request in self.running):
            return True
        is_full = num_scheduled_tokens >= self.max_num_scheduled_tokens
        return bool(self.waiting) and len(self.running) < self.max_num_running_reqs and is_full

    def _without_slots_of(self, held_back: set[str], running: Sequence[Request]) -> LoRAConfig | None:
        """Returns vLLM's LoRA settings, with `max_loras` reduced by the adapters that only `held_back` requests use.

        Otherwise vLLM would admit other adapters instead, and could not schedule all requests in the next step. Returns
        None if adapters are off.
        """
        if self.vllm_config.lora_config is None:
            return None
        seen = {adapter_of(request) for request in running if request.request_id not in held_back}
        hidden = {adapter_of(request) for request in running} - seen - {None}
        limited: LoRAConfig = copy.copy(self.vllm_config.lora_config)
        limited.max_loras -= len(hidden)
        return limited

    def _place(
        self, decoding: Sequence[Request], drafts: Mapping[str, Sequence[int]], joining: Sequence[Request]
    ) -> bool:
        """Sets the drafts that the token budget has room for. Returns False and sets none if there are too few blocks.

        While prompts wait, drafts get at most half of the remaining budget, so that prefill is not starved.
        """
        budget = self.max_num_scheduled_tokens - len(decoding)
        prompt_tokens = min(budget, sum(request.num_tokens - request.num_computed_tokens for request in joining))
        budget = budget // 2 if joining or self.waiting else budget
        num_free_blocks = self.kv_cache_manager.block_pool.get_num_free_blocks()
        num_free_blocks -= -(-prompt_tokens // self.block_size)
        for request in decoding:
            token_ids = drafts[request.request_id][: min(max(0, budget), self._useful_drafts(request))]
            request.spec_token_ids = list(token_ids)
            budget -= len(token_ids)
            num_tokens = request.num_tokens + request.num_output_placeholders
            num_free_blocks -= (num_tokens + len(token_ids) - 1) // self.block_size
            num_free_blocks += (num_tokens - 2) // self.block_size
        if num_free_blocks < 0:
            for request in decoding:
                request.spec_token_ids = []
        return bool(num_free_blocks >= 0)

    def _useful_drafts(self, request: Request) -> int:
        """Returns the maximum number of drafts of `request` that the next step could commit.

        If a step of the request is running, it commits a token first.
        """
        max_len: int = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        num_tokens = request.num_tokens + (request.num_output_placeholders > 0)
        return num_useful_drafts(self.max_drafts, int(num_tokens), max_len)


def adapter_of(request: Request) -> int | None:
    return None if request.lora_request is None else request.lora_request.lora_int_id


def _logprobs(found: Any, width: int | None) -> TokenLogprobs | None:
    """Converts vLLM's log-probabilities. Returns None if there are none.

    vLLM's arrays are [num_tokens, 1 + width]: the token itself, then the likeliest tokens, whose order is kept.
    """
    if found is None or width is None:
        return None
    token_ids, values, ranks = found[:3]
    return TokenLogprobs(
        width,
        ranks.tolist(),
        values[:, 0].tolist(),
        token_ids[:, 1 : 1 + width].flatten().tolist(),
        values[:, 1 : 1 + width].flatten().tolist(),
    )


def _with_held_back(before: Sequence[Request], held_back: set[str], scheduled: Sequence[Request]) -> list[Request]:
    """Returns the requests of `before` that run or were held back, then the new ones."""
    still_running = {id(request) for request in scheduled}
    known = {id(request) for request in before}
    kept = [r for r in before if r.request_id in held_back or id(r) in still_running]
    return kept + [request for request in scheduled if id(request) not in known]
