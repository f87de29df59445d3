"""The step loop of engines that this project schedules itself, with the coordinator that runs the rounds beside it."""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass

from cluster.config import SpeculationConfig
from cluster.coordination.coordinator import Coordinator
from cluster.coordination.pool import DraftPool
from cluster.coordination.sequence import Round, SpeculativeSequence
from cluster.engine import sequence as engine
from cluster.engine.blocks import BlockManager
from cluster.engine.scheduler import ScheduledSequence, Scheduler
from cluster.errors import InvalidRequestError
from cluster.speculation.acceptance import accepted_path, count_accepted
from cluster.targets.base import GenerationOutput, GenerationRequest, Publish, Target, TargetLoad
from cluster.targets.profile import profile_steps
from cluster.telemetry.metrics import Reading, StepTime

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Running:
    """A request with its state in the engine and in the coordinator, which share one list of tokens."""

    request: GenerationRequest
    sequence: engine.Sequence
    speculative: SpeculativeSequence


class StepLoop(Target):
    """A step: take in requests, wait for proposals, schedule, run, sample, accept, commit, tell, publish.

    An engine is a class that adds how a step is run, what its loop needs to know of that beforehand, and where KV goes.
    """

    def __init__(
        self,
        blocks: BlockManager,
        pool: DraftPool,
        speculation: SpeculationConfig,
        *,
        name: str,
        dtype: str,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self.name = name
        self.dtype = dtype
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self._blocks = blocks
        self._pool = pool
        self._speculation = speculation
        self._max_num_batched_tokens = max_num_batched_tokens
        self._coordinator = Coordinator(
            pool, speculation, vocab_size, max_num_seqs=max_num_seqs, max_num_rows=max_num_batched_tokens
        )
        self._scheduler = Scheduler(blocks, max_num_seqs, max_num_batched_tokens)
        self._running: dict[str, _Running] = {}
        self._request_of: dict[engine.Sequence, _Running] = {}
        self._submitted: list[GenerationRequest] = []
        self._aborted: set[str] = set()
        self._wake = threading.Condition()
        self._stopping = False
        self._step_times = {kind: StepTime() for kind in ("prefill", "verify", "decode")}
        self._wait_seconds = 0.0
        self._num_committed_tokens = 0
        self._thread: threading.Thread | None = None

    # What an engine adds; called from the step loop's thread.

    @abstractmethod
    def _choose(self, step: Sequence[tuple[ScheduledSequence, GenerationRequest]]) -> list[int]:
        """Runs the step; returns the target's choice for every row that yields one, in order."""

    @abstractmethod
    def _keep(self, block_table: Sequence[int], start: int, nodes: Sequence[int]) -> None:
        """Of a tree whose node 0 has place `start`, `nodes` are kept: the KV of `nodes[i]` goes to the i-th place."""

    @abstractmethod
    def _time_step(self, num_rows: int) -> float | None:
        """Seconds that a step of `num_rows` rows takes, tried before the first request; None when it cannot be."""

    def _forget(self, sequence: engine.Sequence) -> None:
        """`sequence` has ended: lets go of what the engine itself keeps of it."""

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
        max_len, blocks = request.num_prompt_tokens + request.max_tokens, self._blocks
        if not self._scheduler.fits(max_len):
            raise InvalidRequestError(
                f"the prompt ({request.num_prompt_tokens} tokens) and max_tokens {request.max_tokens} need "
                f"{blocks.num_blocks_for(max_len)} KV blocks, this worker has {blocks.num_blocks}",
                param="max_tokens",
            )
        with self._wake:
            self._submitted.append(request)
            self._wake.notify()

    def abort(self, request_id: str) -> None:
        with self._wake:
            self._aborted.add(request_id)
            self._wake.notify()

    def load(self) -> TargetLoad:
        return TargetLoad(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting) + len(self._submitted),
            num_used_blocks=self._blocks.num_used_blocks,
            num_blocks=self._blocks.num_blocks,
            num_draft_links=self._pool.num_links_up,
        )

    def readings(self) -> Iterable[Reading]:
        def counter(name: str, documentation: str, value: float, **labels: str) -> Reading:
            return Reading(name, documentation, value, is_counter=True, labels=labels)

        load, stats = self.load(), self._coordinator.stats
        yield Reading("vllm:num_requests_running", "Sequences that hold KV blocks.", load.num_running)
        yield Reading("vllm:num_requests_waiting", "Sequences that wait for KV blocks.", load.num_waiting)
        yield counter(
            "vllm:num_preemptions", "Sequences preempted for want of blocks.", self._scheduler.num_preemptions
        )
        usage = load.num_used_blocks / load.num_blocks
        yield Reading("vllm:kv_cache_usage_perc", "Share of the KV blocks in use; 1 is all of them.", usage)
        yield from self._blocks.readings()
        yield Reading("outrider_draft_links_up", "Links to draft workers that are up.", load.num_draft_links)
        for kind, step_time in self._step_times.items():
            yield from step_time.readings("outrider_step", "Steps of the engine", kind=kind)
        yield counter("outrider_proposal_wait_seconds", "Time steps waited for proposals.", self._wait_seconds)
        yield counter("outrider_committed_tokens", "Tokens committed.", self._num_committed_tokens)
        dropped = "Draft tokens or proposals that were dropped, by reason."
        yield counter("outrider_proposals_dropped", dropped, stats.num_stale_proposals, reason="stale")
        yield counter("outrider_proposals_dropped", dropped, stats.num_invalid_token_ids, reason="vocabulary")
        yield counter("outrider_proposals_dropped", dropped, stats.num_excess_token_ids, reason="excess")
        yield counter("outrider_coordination_seconds", "Time the engine's thread spent on rounds.", stats.seconds)
        # `dict` takes a copy in one go, as this is another thread.
        for depth, count in dict(stats.depths).items():
            yield counter("outrider_chosen_depths", "Sequences in steps, by the k chosen.", count, k=str(depth))
        for reason, count in dict(stats.plain_decodes).items():
            plain = "Sequences in steps that were decoded plainly, by reason."
            yield counter("outrider_plain_decodes", plain, count, reason=reason)
        yield counter("outrider_late_rounds", "Times a step gave up waiting for a proposal.", stats.num_late_rounds)
        ended = "Sequences a draft worker would not or could not draft for, by reason."
        yield counter("outrider_sequences_refused", ended, stats.num_refused, reason="full")
        yield counter("outrider_sequences_refused", ended, stats.num_lost, reason="lost")
        yield counter("outrider_sequences_refused", ended, stats.num_without_credit, reason="no_credit")
        spread = self._coordinator.spread
        yield counter("outrider_ejections", "Draft workers that were ejected for silence.", spread.num_ejections)
        moved = "Sequences that were moved from a slow draft worker to another."
        yield counter("outrider_sequences_moved", moved, spread.num_moves)
        size = "Protobuf payload of the links, by direction; kind `open` is the opening of sequences."
        for link in self._pool.links:
            if link.round_trip_seconds is not None:
                yield Reading(
                    "outrider_link_round_trip_seconds",
                    "Shortest of a link's last answers.",
                    link.round_trip_seconds,
                    labels={"draft": link.address},
                )
            for kind, direction, value in (
                ("open", "sent", link.traffic.opens),
                ("round", "sent", link.traffic.sent),
                ("round", "received", link.traffic.received),
            ):
                yield counter("outrider_link_bytes", size, value, draft=link.address, kind=kind, direction=direction)
            codec = "Processor time to make and read the links' messages."
            yield counter("outrider_link_codec_seconds", codec, link.traffic.codec_seconds, draft=link.address)

    # The step loop's thread.

    def _run(self, publish: Publish) -> None:
        try:
            if self._speculation.num_speculative_tokens:
                profile_steps(self._time_step, self._coordinator.planner.verify_seconds, self._max_num_batched_tokens)
            while not self._stopping:
                self._step(publish)
        except BaseException as error:
            # The process must not look healthy with a dead loop; its main program watches `error`.
            self.error = error
            logger.exception("the target's step loop ended")

    def _step(self, publish: Publish) -> None:
        self._take_commands()
        for sequence in self._scheduler.admit():
            self._coordinator.open(self._request_of[sequence].speculative)
        sequences = [s for s in self._scheduler.running if not s.is_prefilling]
        decoding = [self._request_of[s].speculative for s in sequences]
        # One message a link: what the last step committed, and what was admitted since. It goes out before the
        # target's own prefill, so that the draft's runs beside it.
        self._coordinator.flush(decoding, len(self._scheduler.running) - len(decoding))
        waiting_since = time.perf_counter()
        held_back = set(self._coordinator.wait(decoding))
        started_at = time.perf_counter()
        self._wait_seconds += started_at - waiting_since
        if held_back:
            sequences = [s for s in sequences if self._request_of[s].speculative not in held_back]
            decoding = [self._request_of[s].speculative for s in sequences]
        drafts = dict(zip(sequences, self._coordinator.drafts(decoding), strict=True))
        step = self._scheduler.schedule(drafts.__getitem__, lambda sequence: sequence not in drafts)
        if step:
            choices = self._choose([(scheduled, self._request_of[scheduled.sequence].request) for scheduled in step])
            kind = _kind(step)
            if kind == "prefill":
                self._coordinator.planner.skip_step()
            publish(self._commit(step, choices))
            seconds = time.perf_counter() - started_at
            self._step_times[kind].add(seconds)
            if kind != "prefill":
                num_rows = sum(scheduled.num_choices for scheduled in step)
                self._coordinator.observe_step(num_rows, seconds)
        if not self._running:
            self._coordinator.flush()  # the loop will sleep: finished sequences must not wait to be closed

    def _commit(self, step: Sequence[ScheduledSequence], choices: Sequence[int]) -> list[GenerationOutput]:
        """Accepts, commits and rolls back every sequence of the step; finished ones are freed."""
        outputs: list[GenerationOutput] = []
        rounds: list[Round] = []
        start = 0
        for scheduled in step:
            sequence = scheduled.sequence
            if not scheduled.yields_choices:
                self._scheduler.advance(scheduled)
                continue
            own_choices = choices[start : start + scheduled.num_choices]
            start += scheduled.num_choices
            chosen = self._accept(scheduled, own_choices)
            num_accepted = len(chosen) - 1
            num_committed = sequence.commit(chosen)
            # The KV of accepted drafts stays; rejected ones are rolled back by not counting their slots.
            self._scheduler.advance(scheduled, num_accepted)
            self._num_committed_tokens += num_committed
            running = self._request_of[sequence]
            outputs.append(
                GenerationOutput(
                    request_id=running.request.request_id,
                    token_ids=chosen[:num_committed],
                    finish_reason=sequence.finish_reason,
                    num_draft_tokens=len(scheduled.drafts),
                    num_accepted_tokens=min(num_accepted, num_committed),
                )
            )
            if sequence.finish_reason is None:
                rounds.append(Round(running.speculative, scheduled.drafts, chosen))
            else:
                self._release(running)
        self._coordinator.commit(rounds)
        return outputs

    def _accept(self, scheduled: ScheduledSequence, choices: Sequence[int]) -> Sequence[int]:
        """The tokens that `choices` commit: those of the accepted drafts, and the bonus token.

        The KV of the accepted drafts then follows that of the tokens before them.
        """
        drafts, parents, sequence = scheduled.drafts, scheduled.parents, scheduled.sequence
        if parents is None:
            return choices[: count_accepted(drafts.token_ids, choices) + 1]
        path = accepted_path([sequence.token_ids[-1], *drafts.token_ids], parents, choices)
        self._keep(sequence.block_table, sequence.num_computed_tokens, path)
        return [choices[node] for node in path]

    def _take_commands(self) -> None:
        """Requests and aborts that came since the last step; sleeps while there is nothing to do at all."""
        with self._wake:
            while not (self._submitted or self._aborted or self._running or self._stopping):
                self._wake.wait()
            submitted, self._submitted = self._submitted, []
            aborted, self._aborted = self._aborted, set()
        for request in submitted:
            if request.request_id not in aborted:
                self._add(request)
        for request_id in aborted:
            running = self._running.get(request_id)
            if running is not None:
                self._release(running)

    def _add(self, request: GenerationRequest) -> None:
        token_ids = list(request.token_ids)
        sequence = engine.Sequence(
            token_ids=token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            max_len=request.num_prompt_tokens + request.max_tokens,
            eos_token_ids=frozenset() if request.ignore_eos else frozenset(self.eos_token_ids),
            num_speculative_tokens=(
                self._speculation.max_speculative_tokens
                if request.num_speculative_tokens is None
                else request.num_speculative_tokens
            ),
        )
        speculative = SpeculativeSequence(
            token_ids=token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            params=request.params,
            noise_key=request.noise_key,
            num_speculative_tokens=request.num_speculative_tokens,
            max_len=sequence.max_len,
        )
        running = _Running(request, sequence, speculative)
        self._running[request.request_id] = running
        self._request_of[sequence] = running
        self._scheduler.add(sequence)

    def _release(self, running: _Running) -> None:
        self._scheduler.remove(running.sequence)
        self._forget(running.sequence)
        self._coordinator.close(running.speculative)
        del self._running[running.request.request_id]
        del self._request_of[running.sequence]


def _kind(step: Sequence[ScheduledSequence]) -> str:
    """What a step was dominated by: the chunk of a prompt, drafts, or neither."""
    if any(scheduled.num_new_tokens > 1 for scheduled in step):
        return "prefill"
    return "verify" if any(scheduled.drafts for scheduled in step) else "decode"
