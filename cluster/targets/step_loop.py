"""Step loop of the engines that this project schedules itself, with the coordinator of the drafts."""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cluster.config.speculation import SpeculationConfig
from cluster.coordination.base import LinkPool
from cluster.coordination.coordinator import Coordinator, StepTiming
from cluster.coordination.sequence import Round, SpeculativeSequence
from cluster.coordination.timeline import Timeline
from cluster.engine.blocks import BlockManager
from cluster.engine.limits import StepLimits
from cluster.engine.prompt_pace import PromptPart
from cluster.engine.scheduler import Scheduler
from cluster.errors import ContextLengthError, InternalError, NotFoundError, first_line
from cluster.logprobs import TokenLogprobs
from cluster.speculation.acceptance import accepted_path, count_accepted
from cluster.speculation.drafts import NO_DRAFTS, Drafts
from cluster.targets.base import (
    GenerationOutput,
    GenerationRequest,
    Publish,
    Target,
    TargetLoad,
    TargetModel,
    load_readings,
    no_adapter,
)
from cluster.targets.grammar_turns import postpone_slow
from cluster.targets.heartbeat import Heartbeat
from cluster.targets.profile import profile_steps
from cluster.targets.request_times import RequestTimes
from cluster.targets.scoring import Scoring
from cluster.targets.token_generator import Generation, Scheduled
from cluster.telemetry.metrics import Reading, StepTime

logger = logging.getLogger(__name__)

_MAX_SCORED_VALUES = 2**26  # float32 logits of the prompt tokens that a step scores: at most 256 MiB

_MAX_FAILED_STEPS = 3  # consecutive failures after which the engine has to be restarted


ReadChoices = Callable[[], list[int]]
"Waits for a step, and returns the target's choices, in order of the rows that yield a choice."


@dataclass(frozen=True, slots=True)
class _LaunchedStep:
    parts: Sequence[Scheduled]
    prompts: Sequence[PromptPart]
    read: ReadChoices
    launched_at: float


class StepLoop(Target):
    """Runs steps: wait for proposals, schedule, run, sample, accept, commit, take requests, notify drafters, publish.

    A subclass runs the forward pass, computes log-probabilities, moves KV, and measures steps before the first request.

    With `launches_ahead`, a step is launched before the choices of the previous step are read, unless draft workers
    draft or a request needs the host. So the device does not wait for the host. The end of a sequence is then detected
    a step late; the extra choices are dropped.
    """

    launches_ahead = False  # requires a device that computes while the host goes on

    def __init__(
        self,
        model: TargetModel,
        limits: StepLimits,
        blocks: BlockManager,
        pool: LinkPool,
        speculation: SpeculationConfig,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if pool.drafts_in_turn:  # nothing runs ahead in the target's thread
            speculation = speculation.model_copy(update={"max_run_ahead": 0})
        self.model = model
        self.limits = limits
        self.block_size = blocks.block_size
        self.caches_prefixes = blocks.caches_prefixes
        self._blocks = blocks
        self._pool = pool
        self._speculation = speculation
        # Rejection sampling needs the draft's probability, which a grammar's proposal does not have.
        self._drafts_by_grammar = speculation.num_speculative_tokens > 0 and speculation.acceptance != "rejection"
        self._clock = clock
        self._coordinator = Coordinator(pool, speculation, model.vocab_size, limits, clock)
        max_scored_tokens = max(1, _MAX_SCORED_VALUES // model.vocab_size)
        self._scheduler: Scheduler[Generation] = Scheduler(blocks, limits, max_scored_tokens)
        self._generations: dict[str, Generation] = {}  # by request ID
        self._submitted: list[GenerationRequest] = []
        self._aborted: set[str] = set()
        self._wake = threading.Condition()
        self._stopping = False
        self._heartbeat = Heartbeat()
        self._reset_metrics()
        self._num_failed_steps = 0
        self._num_failed_in_row = 0
        self._postponed: set[Generation] = set()  # sequences that do not decode in the next step
        self._launched_ahead: _LaunchedStep | None = None  # launched ahead; its choices are unread
        self._last_read_at = 0.0  # when the choices of the last step were read
        self._thread: threading.Thread | None = None

    # Engine-specific parts; called from the step loop's thread.

    @abstractmethod
    def _launch(self, step: Sequence[Scheduled]) -> ReadChoices:
        """Starts the step. Returns a function that waits for its choices.

        Unread inputs are choices of the previous step.
        """

    @abstractmethod
    def _score(self, rows: Sequence[int], token_ids: Sequence[int], width: int) -> TokenLogprobs:
        """Returns the log-probabilities of `token_ids`, one for each of `rows`, and of the `width` likeliest tokens.

        `rows` index the logits of the last step. Each sequence of the step has `num_logits` rows.
        """

    @abstractmethod
    def _keep(self, block_table: Sequence[int], start: int, nodes: Sequence[int]) -> None:
        """Moves the KV of a tree's node `nodes[i]` to place `start + i`. Node 0 of the tree is at place `start`."""

    @abstractmethod
    def _time_step(self, num_rows: int) -> float | None:
        """Runs a step of `num_rows` rows before the first request. Returns its seconds; None if the step cannot run."""

    def _drafts_of(self, generation: Generation, collected: Mapping[SpeculativeSequence, Drafts]) -> Drafts:
        """Returns the drafts for `generation` in the next step. `collected`: those of the draft workers."""
        return collected.get(generation.speculative, NO_DRAFTS)

    def _recovers(self) -> bool:
        """Returns True if the engine can run steps after a failed step."""
        return True

    def _forget(self, generation: Generation) -> None:
        """Releases the engine's own state of `generation`, which has ended."""

    @property
    def is_stuck(self) -> bool:
        return self._heartbeat.is_stuck

    @property
    def timeline(self) -> Timeline:
        return self._coordinator.timeline

    def start(self, publish: Publish) -> None:
        self._thread = threading.Thread(target=self._run, args=(publish,), name="target", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    async def run_links(self, endpoints: AsyncIterator[Sequence[str]]) -> None:
        await self._pool.run(endpoints)

    def submit(self, request: GenerationRequest) -> None:
        if request.adapter:
            raise NotFoundError(no_adapter(request.adapter))
        max_len, blocks = request.num_prompt_tokens + request.max_tokens, self._blocks
        if not self._scheduler.fits(max_len):
            raise ContextLengthError(
                f"the prompt ({request.num_prompt_tokens} tokens) and max_tokens {request.max_tokens} need "
                f"{blocks.num_blocks_for(max_len)} KV blocks, this worker has {blocks.num_blocks}",
                param="max_tokens",
            )
        with self._wake:
            self._submitted.append(request)
            self._wake.notify()

    def abort(self, request_id: str) -> None:
        with self._wake:
            self._submitted = [request for request in self._submitted if request.request_id != request_id]
            self._aborted.add(request_id)
            self._wake.notify()

    def load(self) -> TargetLoad:
        waiting = [sequence.token_ids for sequence in list(self._scheduler.waiting)]  # copied: the engine changes it
        waiting += [request.token_ids for request in self._submitted]
        return TargetLoad(
            num_running=len(self._scheduler.running),
            num_waiting=len(waiting),
            num_waiting_tokens=sum(map(len, waiting)),
            demand=self._coordinator.demand(),
            num_used_blocks=self._blocks.num_used_blocks,
            num_blocks=self._blocks.num_blocks,
            num_draft_links=self._pool.num_links_up,
            num_draft_endpoints=self._pool.num_endpoints,
        )

    def readings(self) -> Iterable[Reading]:
        load, committed = self.load(), self._num_committed_tokens
        yield from load_readings(load)
        yield Reading("outrider_committed_tokens", "Tokens committed.", committed, is_counter=True)
        failed = "Failed steps, whose requests ended with an error."
        yield Reading("outrider_failed_steps", failed, self._num_failed_steps, is_counter=True)
        stuck = "1 while the engine has work and makes no progress."
        yield Reading("outrider_engine_stuck", stuck, float(self.is_stuck))
        yield self._heartbeat.busy
        yield from self._request_times.readings()
        yield from self._scheduler.readings()
        yield from self._blocks.readings()
        for kind, step_time in self._step_times.items():
            yield from step_time.readings("outrider_step", "Steps of the engine", kind=kind)
        yield from self._coordinator.readings()
        yield from self._pool.readings()

    # The step loop's thread.

    def _run(self, publish: Publish) -> None:
        try:
            self.profile()
            while not self._stopping:
                if not self._generations:
                    self._sleep_until_asked()
                    self._take_commands(publish)
                self._heartbeat.begin()
                self._step(publish)
                self._heartbeat.end()
        except BaseException as error:
            # The process must not look healthy after its loop has ended: its main program watches `error`.
            self.error = error
            logger.exception("the target's step loop ended")

    def profile(self) -> None:
        """Measures the duration of steps before the first request, for the coordinator and for prefill pacing."""
        if self._speculation.num_speculative_tokens or self.limits.max_prefill_seconds is not None:
            times = list(profile_steps(self._time_step, self.limits.max_num_batched_tokens))
            self._coordinator.observe_step_times(times)
            self._scheduler.pace.know(times)

    def _reset_metrics(self) -> None:
        """Resets the metrics of requests and steps."""
        self._request_times = RequestTimes()
        self._step_times = {kind: StepTime() for kind in ("prefill", "verify", "decode")}
        self._num_committed_tokens = 0

    def run_step(self, publish: Publish) -> bool:
        """Runs one step in the caller's thread, for a target that was not started.

        Returns False if there is no work.
        """
        if not self._generations:
            self._take_commands(publish)
        if not self._generations:
            return False
        self._step(publish)
        return True

    def _step(self, publish: Publish) -> None:
        self._postponed = postpone_slow(self._scheduler.running)
        decoding = [
            generation.speculative
            for generation in self._scheduler.running
            if not (generation.is_prefilling or generation in self._postponed)
        ]
        self._coordinator.plan(decoding, self._joining())
        self._scheduler.pace.spare_seconds = self._coordinator.planner.spare_seconds
        launches_ahead = self.launches_ahead and not (
            any(generation.needs_host for generation in self._scheduler.running)
            or self._coordinator.expects_drafts(decoding)
        )
        previous = self._launched_ahead
        if launches_ahead:
            self._launched_ahead = self._start_step({}, publish)
            self._end_step(previous, publish)
            running = {generation.speculative for generation in self._scheduler.running}
            self._coordinator.collect([sequence for sequence in decoding if sequence in running])
        elif previous is not None:  # the next step follows the tokens of this one
            self._launched_ahead = None
            self._end_step(previous, publish)
        else:
            self._end_step(self._start_step(self._coordinator.collect(decoding), publish), publish)

    def _start_step(self, drafts: Mapping[SpeculativeSequence, Drafts], publish: Publish) -> _LaunchedStep | None:
        """Schedules and launches a step with `drafts`. Returns None if there is nothing to do, or if it failed."""
        step = self._scheduler.schedule(
            lambda generation: self._allowed(generation, self._drafts_of(generation, drafts)), self._postponed
        )
        if not step:
            return None
        launched_at = self._clock()
        prompts = [PromptPart(part.num_new_tokens, part.start) for part in step if part.num_new_tokens > 1]
        try:
            return _LaunchedStep(step, prompts, self._launch(step), launched_at)
        except RuntimeError as error:  # PyTorch raises RuntimeError for device errors: no memory, a failed kernel
            publish(self._fail(step, error))
            return None

    def _end_step(self, launched: _LaunchedStep | None, publish: Publish) -> None:
        """Reads and commits the choices of `launched`; takes requests; notifies the drafters; publishes the tokens."""
        rounds: list[Round] = []
        outputs: list[GenerationOutput] = []
        timing = None
        if launched is not None:
            try:
                choices = launched.read()
            except RuntimeError as error:
                outputs = self._fail(launched.parts, error)
            else:
                self._num_failed_in_row = 0
                rounds, outputs = self._commit(launched.parts, choices)
                seconds = self._clock() - max(launched.launched_at, self._last_read_at)
                timing = self._time(launched.parts, launched.prompts, len(choices), seconds)
            self._last_read_at = self._clock()
        # Admit new requests before notifying the drafters: the same message then opens the admitted ones, so drafters
        # compute the prompts during the target's prefill.
        self._take_commands(publish)
        self._coordinator.end(rounds, timing, self._joining())
        if not self._generations:
            self._launched_ahead = None  # all its sequences have ended
        if outputs:
            publish(outputs)

    def _allowed(self, generation: Generation, drafts: Drafts) -> Drafts:
        """Returns the drafts that the constraints of `generation` allow, followed by the grammar's own drafts."""
        if generation.constraint is None:
            return drafts
        return generation.constraint.drafts(drafts, generation.max_useful_drafts if self._drafts_by_grammar else 0)

    def _fail(self, step: Sequence[Scheduled], error: RuntimeError) -> list[GenerationOutput]:
        """Ends the sequences of `step`, which failed with `error`. Other sequences are not affected.

        Raises `error` if the device is lost, or if `_MAX_FAILED_STEPS` steps in a row have failed. This ends the
        worker, so its requests go to other targets.
        """
        self._num_failed_steps += 1
        self._num_failed_in_row += 1
        if self._num_failed_in_row >= _MAX_FAILED_STEPS or not self._recovers():
            raise error
        logger.error("a step of %d sequences failed; they end with an error", len(step), exc_info=error)
        failure = InternalError(f"the step that computed it failed: {first_line(error)}")
        failed = [part.sequence for part in step if self._has_not_ended(part.sequence)]
        self._release(*failed)
        return [GenerationOutput(generation.request.request_id, (), None, 0, 0, error=failure) for generation in failed]

    def _has_not_ended(self, generation: Generation) -> bool:
        return self._generations.get(generation.request.request_id) is generation

    def _joining(self) -> list[SpeculativeSequence]:
        return [generation.speculative for generation in self._scheduler.running if generation.is_prefilling]

    def _time(
        self, step: Sequence[Scheduled], prompts: Sequence[PromptPart], num_rows: int, seconds: float
    ) -> StepTiming:
        """Records a step of `seconds`, in which `num_rows` rows yielded a choice. Returns its timing."""
        kind = StepTime.kind(
            has_prompt=any(scheduled.num_new_tokens > 1 for scheduled in step),
            has_drafts=any(scheduled.drafts for scheduled in step),
        )
        self._step_times[kind].add(seconds)
        num_step_rows = sum(scheduled.num_new_tokens + len(scheduled.drafts) for scheduled in step)
        self._scheduler.pace.observe(num_step_rows, prompts, seconds)
        self._request_times.stepped(num_step_rows)
        return StepTiming(
            num_rows,
            seconds,
            is_pure=kind != "prefill",
            num_prompts=len(prompts),
            num_prompt_tokens=sum(prompt.num_tokens for prompt in prompts),
            left_prompts=any(generation.is_prefilling for generation in self._scheduler.running),
            longest_context=max((prompt.num_before for prompt in prompts), default=0),
        )

    def _commit(self, step: Sequence[Scheduled], choices: Sequence[int]) -> tuple[list[Round], list[GenerationOutput]]:
        """Accepts, commits and rolls back every sequence of the step. Releases finished sequences.

        Returns the rounds of the other sequences, and the outputs of all.
        """
        outputs: list[GenerationOutput] = []
        rounds: list[Round] = []
        scoring = Scoring()
        start = first_row = 0
        for scheduled in step:
            generation = scheduled.sequence
            if not self._has_not_ended(generation):  # it ended after this step was launched
                start += scheduled.num_choices
                first_row += scheduled.num_logits
                continue
            end_row = first_row + scheduled.num_logits
            prompt_logprobs = scoring.add_prompt(scheduled, first_row)
            first_row = end_row
            if not scheduled.yields_choices:
                self._scheduler.advance(scheduled)
                if prompt_logprobs is not None:
                    outputs.append(GenerationOutput.of_prompt(generation.request.request_id, prompt_logprobs))
                continue
            end = start + scheduled.num_choices
            path = self._accept(scheduled, choices[start:end])
            chosen = [choices[start + node] for node in path]
            start = end
            num_accepted = len(chosen) - 1
            num_committed = generation.commit(chosen)
            # The KV of accepted drafts stays. Rejected drafts need no cleanup: their slots do not count as computed.
            self._scheduler.advance(scheduled, num_accepted, num_committed)
            self._num_committed_tokens += num_committed
            committed = chosen[:num_committed]
            rows = [end_row - len(scheduled.drafts) - 1 + node for node in path[:num_committed]]
            outputs.append(
                GenerationOutput(
                    request_id=generation.request.request_id,
                    token_ids=committed,
                    finish_reason=generation.finish_reason,
                    num_draft_tokens=len(scheduled.drafts),
                    num_accepted_tokens=min(num_accepted, num_committed),
                    error=generation.error,
                    logprobs=scoring.add(rows, committed, generation.request.num_logprobs),
                    prompt_logprobs=prompt_logprobs,
                    num_cached_tokens=generation.num_cached_tokens or 0,
                )
            )
            generation.num_cached_tokens = 0  # reported only once
            self._request_times.committed(generation.request.request_id)
            if generation.finish_reason is None and generation.error is None:
                rounds.append(Round(generation.speculative, scheduled.drafts, chosen))
            else:
                self._release(generation)
        scoring.finish(self._score)
        return rounds, outputs

    def _accept(self, scheduled: Scheduled, choices: Sequence[int]) -> Sequence[int]:
        """Returns the nodes whose `choices` are committed: node 0, the last committed token, and the accepted drafts.

        In a tree, moves the KV of the accepted drafts into the slots after the last committed token.
        """
        drafts, parents, sequence = scheduled.drafts, scheduled.parents, scheduled.sequence
        if parents is None:
            return range(count_accepted(drafts.token_ids, choices) + 1)
        path = accepted_path([sequence.token_ids[-1], *drafts.token_ids], parents, choices)
        self._keep(sequence.block_table, scheduled.start, path)
        return path

    def _sleep_until_asked(self) -> None:
        with self._wake:
            self._wake.wait_for(lambda: self._submitted or self._aborted or self._stopping)

    def _take_commands(self, publish: Publish) -> None:
        """Processes aborts and new requests; admits the requests that fit."""
        with self._wake:
            submitted, self._submitted = self._submitted, []
            aborted, self._aborted = self._aborted, set()
        # Aborts come first: a request that was submitted after an abort may have the same ID.
        self._release(*(self._generations[request_id] for request_id in aborted & self._generations.keys()))
        for request in submitted:
            generation = Generation.of(request, self.model, self._speculation.max_speculative_tokens)
            self._generations[request.request_id] = generation
            self._scheduler.add(generation)
        admitted = self._scheduler.admit()
        for generation in admitted:
            self._request_times.admitted(
                generation.request.request_id,
                time.monotonic() - generation.request.arrived_at,
                len(generation.token_ids) - generation.num_computed_tokens,
            )
        traced = [generation.request.request_id for generation in admitted if generation.request.is_traced]
        if traced:
            publish([GenerationOutput.of_admission(request_id) for request_id in traced])

    def _release(self, *generations: Generation) -> None:
        self._scheduler.remove(*generations)
        for generation in generations:
            del self._generations[generation.request.request_id]
            self._request_times.ended(generation.request.request_id, generation.num_preemptions)
            self._coordinator.close(generation.speculative)
            self._forget(generation)
