"""Our part of the engine core's process: vLLM's scheduler with our rounds, and the core's end of the channel."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from vllm.v1.engine import FinishReason as VllmFinishReason
from vllm.v1.request import Request

from cluster.config import Config
from cluster.coordination.pool import DraftPool
from cluster.coordination.timeline import News, TimelineReader
from cluster.engine.constraint import TokenConstraint
from cluster.engine.prompt_pace import PromptPace
from cluster.engine.sequence import FinishReason
from cluster.errors import first_line
from cluster.speculation.drafts import Drafts
from cluster.targets.base import GenerationOutput, TargetLoad, load_readings
from cluster.targets.heartbeat import Heartbeat
from cluster.targets.request_times import RequestTimes
from cluster.telemetry.logs import log_name, setup_logging
from cluster.telemetry.metrics import Reading, StepTime
from cluster.vllm.channel import Endpoints, Failed, Outputs, Profiled, Status, VocabularyMessage, connect
from cluster.vllm.constraints import RequestConstraints, is_constrained
from cluster.vllm.core.device_rounds import DeviceRounds
from cluster.vllm.core.owners_queue import OwnersQueue
from cluster.vllm.core.pool_scheduler import PoolScheduler
from cluster.vllm.core.profiling import ProfilingRounds
from cluster.vllm.core.scheduler import EngineStep, adapter_of
from cluster.vllm.core.scheduler_rounds import CoordinatedRounds
from cluster.vllm.coupling import Coupling, extra_args_of

SCHEDULER = "cluster.vllm.core.target_scheduler.CoordinatedScheduler"
ASYNC_SCHEDULER = "cluster.vllm.core.async_target_scheduler.AsyncCoordinatedScheduler"
REQUEST_ID_KEY = "outrider_request_id"  # key of our request ID in `extra_args`: vLLM makes its own IDs
TRACED_KEY = "outrider_is_traced"  # key in `extra_args` of requests whose admission is published

logger = logging.getLogger(__name__)

_STATUS_SECONDS = 0.2
_OF_VLLM = {
    VllmFinishReason.STOP: FinishReason.STOP,
    VllmFinishReason.LENGTH: FinishReason.LENGTH,
}


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """Settings that are sent in vLLM's `additional_config`."""

    channel: str
    config: Config
    tokenizer_fingerprint: str
    drafts_on_device: bool  # whether the model runner drafts, to the depth that `DeviceRounds` chooses

    def compute_hash(self) -> str:
        """Returns an empty hash: no setting changes what vLLM compiles."""
        return ""


class CoordinatedScheduler(PoolScheduler):
    """Scheduler class that vLLM loads as its `scheduler_cls`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = self.vllm_config.additional_config
        assert isinstance(settings, CoreSettings)
        config, speculation = settings.config, settings.config.speculation
        setup_logging(f"{log_name('target')} engine", config.logging.level, config.logging.format)
        num_kv_tokens = self.kv_cache_manager.block_pool.num_gpu_blocks * self.block_size
        self.waiting = OwnersQueue(self.max_num_running_reqs, num_kv_tokens, self.all_running)
        self._heartbeat = Heartbeat()
        self._request_times = RequestTimes()
        self._num_committed_tokens = 0
        self._has_draft_workers = config.has_draft_workers
        self.pace = PromptPace(
            config.target.max_prefill_seconds, self.max_num_scheduled_tokens, config.target.first_token_limit
        )
        if self._has_draft_workers:
            self.rounds = ProfilingRounds(speculation.max_speculative_tokens)
        elif settings.drafts_on_device:
            is_fixed = speculation.controller == "fixed"
            self.rounds = DeviceRounds(self.max_drafts, speculation.num_speculative_tokens, is_fixed=is_fixed)
        self._constraints = RequestConstraints(self.vllm_config.model_config.get_vocab_size())
        self._ended: list[Request] = []  # since the last step
        self._num_cached_tokens: dict[str, int] = {}  # by request that has not committed a token yet
        self.connect(partial(DraftPool.of, config, settings.tokenizer_fingerprint), speculation)
        self._follower = TimelineReader()
        self._channel = connect(settings.channel, self._receive, _end_process)
        logging.getLogger("vllm").addHandler(_LastWords(self._channel.send))
        threading.Thread(target=self._report, name="channel-status", daemon=True).start()

    def schedule(self, throttle_prefills: bool = False) -> Any:
        self._heartbeat.begin()
        if self._ended:
            self._constraints.keep_only(self.requests)
        for request in self._ended:
            self._num_cached_tokens.pop(request.request_id, None)
            self._request_times.ended(request.request_id, request.num_preemptions)
        self._ended.clear()
        if self.waiting:
            self._make_room()
        if self.may_lack_blocks:  # vLLM preempts the last ones
            self.running = [*self.waiting.fair.from_last(self.running)][::-1]
        output = super().schedule(throttle_prefills)
        admitted_now = self.admitted(output)
        for new in admitted_now:
            request = self.requests[new.req_id]
            num_uncached = request.num_prompt_tokens - new.num_computed_tokens
            self._request_times.admitted(new.req_id, time.time() - request.arrival_time, num_uncached)
            self._num_cached_tokens[new.req_id] = new.num_computed_tokens
        admitted = [extra_args_of(new.sampling_params) for new in admitted_now]
        if traced := [extra_args[REQUEST_ID_KEY] for extra_args in admitted if TRACED_KEY in extra_args]:
            self._channel.send(Outputs([GenerationOutput.of_admission(request_id) for request_id in traced]))
        return output

    def _make_room(self) -> None:
        """Preempts requests of owners that yield, if that makes room for the first request that waits."""
        first = self.waiting.peek_request()
        is_enough = self._is_enough_for(first)
        if first.num_stale_output_tokens or is_enough(()):  # the former cannot start yet
            return
        all_yielding = self.waiting.fair.who_yield(self.running, is_enough)
        if not all(map(self._request_blocks_can_be_freed, all_yielding)):
            return
        for yielding in all_yielding:
            self.running.remove(yielding)
            self._preempt_request(yielding, time.monotonic())
            self.prev_step_scheduled_req_ids.discard(yielding.request_id)  # if it resumes at once, it counts as resumed

    def _is_enough_for(self, first: Request) -> Callable[[Sequence[Request]], bool]:
        """Returns the function that says whether there is room for `first` without some of those that run."""
        manager, pool = self.kv_cache_manager, self.kv_cache_manager.block_pool

        @cache
        def prefix() -> list[Any]:
            hits = ()
            if manager.prefix_cache_lookup_enabled(first):
                hits, *_ = manager.coordinator.find_longest_cache_hit(first.block_hashes, first.num_tokens - 1)
            return [*itertools.chain.from_iterable(hits)]

        def is_enough(yielding: Sequence[Request]) -> bool:
            remaining = [request for request in self.running if request not in yielding]
            if len(remaining) >= self.max_num_running_reqs:
                return False
            adapters = {adapter_of(request) for request in (*remaining, first)} - {None}
            if self.lora_config is not None and len(adapters) > self.lora_config.max_loras:
                return False
            tables = [table for request in yielding for table in manager.get_block_ids(request.request_id)]
            num_less = Counter(itertools.chain.from_iterable(tables))
            num_given_back = sum(pool.blocks[block].ref_cnt == number for block, number in num_less.items())
            num_shared = sum(block.ref_cnt > num_less[block.block_id] for block in prefix())
            num_available: int = pool.get_num_free_blocks() + num_given_back + num_shared
            return num_available * int(self.block_size) >= int(first.num_tokens)

        return is_enough

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._heartbeat.end()
        # The channel has sent the tokens. vLLM's client only needs the outputs that end a request.
        for of_client in outputs.values():
            of_client.outputs = [output for output in of_client.outputs if output.finish_reason is not None]
            for output in of_client.outputs:
                output.new_logprobs = output.new_prompt_logprobs_tensors = None
        return {client: own for client, own in outputs.items() if own.outputs or own.finished_requests}

    def drafts(self, request: Request, proposed: Sequence[int], most: int) -> Sequence[int]:
        constraint = self._constraint(request)
        if constraint is None:  # the usual case
            return proposed[:most]
        coupling = Coupling.of(request.sampling_params)
        if coupling is not None and coupling.num_speculative_tokens is not None:
            most = min(most, coupling.num_speculative_tokens)
        return constraint.drafts(Drafts(proposed[:most]), most).token_ids

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        self._ended.append(request)
        return super()._free_request(request, delay_free_blocks)

    def _constraint(self, request: Request) -> TokenConstraint | None:
        params = request.sampling_params
        if not is_constrained(params):  # the usual case
            return None
        coupling = Coupling.of(params)
        assert coupling is not None
        return self._constraints.of(request.request_id, params, request.all_token_ids[coupling.num_prompt_tokens :])

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Stores the drafts of vLLM's own proposer, limited to each request's `num_speculative_tokens`."""
        super().update_draft_token_ids(draft_token_ids)
        if self.rounds is None:
            for request in self.running:
                coupling = Coupling.of(request.sampling_params) if request.spec_token_ids else None
                if coupling is not None and coupling.num_speculative_tokens is not None:
                    request.spec_token_ids = request.spec_token_ids[: coupling.num_speculative_tokens]

    def stepped(self, step: EngineStep) -> None:
        """Publishes the step."""
        super().stepped(step)
        if not step.rounds:
            return
        self._request_times.stepped(step.num_tokens)
        outputs = []
        for committed in step.rounds:
            request_id = extra_args_of(committed.request.sampling_params).get(REQUEST_ID_KEY)
            constraint = self._constraint(committed.request)
            self._num_committed_tokens += len(committed.token_ids)
            self._request_times.committed(committed.request.request_id)
            if request_id is not None:
                outputs.append(
                    GenerationOutput(
                        request_id,
                        list(committed.token_ids),
                        None if committed.finish_reason is None else _OF_VLLM.get(committed.finish_reason),
                        num_draft_tokens=len(committed.draft_token_ids),
                        num_accepted_tokens=committed.num_accepted,
                        error=None if constraint is None else constraint.error,
                        logprobs=committed.logprobs,
                        prompt_logprobs=committed.prompt_logprobs,
                        num_cached_tokens=self._num_cached_tokens.pop(committed.request.request_id, 0),
                    )
                )
        self._channel.send(Outputs(outputs))

    # The channel's threads.

    def _receive(self, message: Any) -> None:
        if isinstance(message, VocabularyMessage):
            self._constraints.know_vocabulary(message.written)
        elif isinstance(message, Endpoints) and self._has_draft_workers:
            self.links.follow(message.addresses)
        elif isinstance(message, Profiled):
            if isinstance(self.rounds, ProfilingRounds):
                self.rounds = self.coordinated_rounds(self.rounds.step_times)
            elif isinstance(self.rounds, DeviceRounds):
                self.rounds.tried()
            self.step_times, self._request_times = {kind: StepTime() for kind in self.step_times}, RequestTimes()
            self._num_committed_tokens = self.num_queried_tokens = self.num_hit_tokens = 0

    def _report(self) -> None:
        while True:
            try:
                self._send_status()
            except Exception:  # for example if a table grew while it was read; the next report will succeed
                logger.exception("a status report failed")
            time.sleep(_STATUS_SECONDS)

    def _send_status(self) -> None:
        pool, rounds = self.links.pool, self.rounds
        load = replace(
            self.load(),
            num_draft_links=pool.num_links_up,
            num_draft_endpoints=pool.num_endpoints,
            demand=rounds.demand() if isinstance(rounds, CoordinatedRounds) else None,
        )
        readings = list(self._readings(load))  # before the news: it may fail, and would lose them
        news = self._follower.news(rounds.timeline) if isinstance(rounds, CoordinatedRounds) else News()
        self._channel.send(Status(load, self._heartbeat.is_stuck, readings, news))

    def _readings(self, load: TargetLoad) -> Iterator[Reading]:
        def counter(name: str, documentation: str, value: float) -> Reading:
            return Reading(name, documentation, value, is_counter=True)

        yield Reading("vllm:num_requests_running", "Sequences that hold KV blocks.", load.num_running)
        yield from load_readings(load, num_deferred=len(self.deferred_waiting))
        yield counter("vllm:num_preemptions", "Sequences preempted because blocks were missing.", self.num_preemptions)
        yield Reading("outrider_kv_blocks", "Total KV blocks.", load.num_blocks)
        yield Reading("outrider_kv_blocks_used", "KV blocks in use.", load.num_used_blocks)
        yield counter("vllm:prefix_cache_queries", "Tokens of admitted sequences.", self.num_queried_tokens)
        hits = "Tokens of admitted sequences whose KV was in the prefix cache."
        yield counter("vllm:prefix_cache_hits", hits, self.num_hit_tokens)
        yield counter("outrider_committed_tokens", "Tokens committed.", self._num_committed_tokens)
        yield self._heartbeat.busy
        yield from self._request_times.readings()
        yield from self.readings()


class _LastWords(logging.Handler):
    """Log handler that sends the exception that vLLM logs before its engine core ends."""

    def __init__(self, send: Any) -> None:
        super().__init__(logging.ERROR)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            self._send(Failed(f"{type(error).__name__}: {first_line(error)}"))


def _end_process() -> None:
    """Ends this process, because its worker is gone and no other process can use this engine."""
    os._exit(1)
