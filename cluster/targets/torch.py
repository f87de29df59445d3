"""The PyTorch target: a step is a forward pass over the paged KV cache, and sampling under the shared noise."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Sequence

import torch

from cluster.config.speculation import SpeculationConfig
from cluster.constraints import UNCONSTRAINED
from cluster.coordination.base import LinkPool
from cluster.drafters.target_states import ComputedSequence, TargetStates
from cluster.engine.batch import Segment
from cluster.engine.limits import StepLimits
from cluster.engine.runner import ModelRunner
from cluster.errors import InvalidRequestError
from cluster.logprobs import TokenLogprobs
from cluster.speculation.device_copy import HostCopy
from cluster.speculation.drafts import path_to
from cluster.speculation.sampling import Sampler, SampleRequest
from cluster.speculation.scoring import token_logprobs
from cluster.speculation.token_counts import TokenCounts
from cluster.targets.base import GenerationRequest, TargetModel
from cluster.targets.rejection import RejectionSampler
from cluster.targets.step_loop import ReadChoices, StepLoop
from cluster.targets.token_generator import Generation, Scheduled

logger = logging.getLogger(__name__)


class TorchTarget(StepLoop):
    """Computes with the PyTorch engine."""

    def __init__(
        self,
        name: str,
        runner: ModelRunner,
        limits: StepLimits,
        pool: LinkPool,
        speculation: SpeculationConfig,
        rejection: RejectionSampler | None = None,
        states: TargetStates | None = None,
    ) -> None:
        """`rejection`: decides acceptance; None: coupled acceptance. `states`: read by the pool's drafter."""
        dtype, config = str(runner.model.dtype).removeprefix("torch."), runner.model.config
        model = TargetModel(name, dtype, config.vocab_size, config.eos_token_ids)
        super().__init__(model, limits, runner.blocks, pool, speculation)
        self._runner = runner
        self._sampler = Sampler(runner.model.device)
        self._rejection = rejection
        self._logits = torch.empty(0)  # logits of the step
        self._choices: torch.Tensor | None = None  # choices of the step, on the device
        self._choice_of: dict[Generation, int] = {}  # index in `_choices`, if there are no drafts
        self.launches_ahead = runner.model.device.type == "cuda" and rejection is None
        if states is not None:
            states.find = self._computed_sequences
        num_threads, num_cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
        if runner.model.device.type == "cpu" and num_threads > num_cores:
            logger.warning("%d threads compute on %d cores: set target.threads to null", num_threads, num_cores)

    def submit(self, request: GenerationRequest) -> None:
        if self._rejection is not None and request.constraints != UNCONSTRAINED:
            raise InvalidRequestError(
                "constraints of the answer need speculation.acceptance coupled; this target uses rejection"
            )
        super().submit(request)

    def _launch(self, step: Sequence[Scheduled]) -> ReadChoices:
        is_ahead = any(part.has_unread_input for part in step)
        segments = [part.segment(self._unread_choice(part)) for part in step]
        self._logits = self._runner.run(segments, self._choices if is_ahead else None)
        logits = _of_choices(self._logits, step)
        requests = [
            row
            for scheduled in step
            if scheduled.yields_choices
            for row in _sample_requests(
                scheduled, scheduled.sequence.count(self._runner.model.device, self.model.vocab_size)
            )
        ]
        ids = self._sampler.best_tokens(logits, requests, 1)[0].flatten() if requests else logits.new_empty(0)
        copy, rejection = HostCopy(ids), self._rejection
        self._choices, self._choice_of = ids, {}
        if self.launches_ahead:
            choosing = (part.sequence for part in step if part.yields_choices)
            self._choice_of = {sequence: index for index, sequence in enumerate(choosing)}
        return copy.read if rejection is None else lambda: rejection.revise(copy.read(), logits, step)

    def _unread_choice(self, part: Scheduled) -> int | None:
        """Returns what stands for the input of `part` (`ModelRunner.run`) if it is a choice of the previous step."""
        return -1 - self._choice_of[part.sequence] if part.has_unread_input else None

    def _computed_sequences(self) -> dict[int, ComputedSequence]:
        return {
            generation.speculative.wire_id: ComputedSequence(generation.block_table, generation.num_computed_tokens)
            for generation in self._scheduler.running
        }

    def _score(self, rows: Sequence[int], token_ids: Sequence[int], width: int) -> TokenLogprobs:
        return token_logprobs(self._logits, rows, token_ids, width)

    def _recovers(self) -> bool:
        return self._runner.recovers()

    def _forget(self, generation: Generation) -> None:
        if self._rejection is not None:
            self._rejection.forget(generation)

    def _keep(self, block_table: Sequence[int], start: int, nodes: Sequence[int]) -> None:
        self._runner.keep(block_table, start, nodes)

    def _time_step(self, num_rows: int) -> float | None:
        blocks = self._runner.blocks
        block_table = blocks.allocate(blocks.num_blocks_for(num_rows))
        if block_table is None:
            return None
        started_at = time.perf_counter()
        self._runner.run([Segment([0] * num_rows, 0, block_table, num_logits=num_rows)])
        self._runner.wait()
        blocks.free(block_table)
        return time.perf_counter() - started_at


def _of_choices(logits: torch.Tensor, step: Sequence[Scheduled]) -> torch.Tensor:
    """Returns the rows of `logits` that yield choices: all rows except those that only score prompt tokens."""
    if not any(scheduled.num_scored for scheduled in step):
        return logits
    rows: list[int] = []
    end = 0
    for scheduled in step:
        end += scheduled.num_logits
        rows.extend(range(end - scheduled.num_choices, end))
    return logits[rows]


def _sample_requests(scheduled: Scheduled, counts: TokenCounts | None) -> Iterable[SampleRequest]:
    """Yields sample requests for the rows of `scheduled`: one for a chain, one for each row of a tree.

    `counts`: token counts of the sequence, for penalties.
    """
    generation = scheduled.sequence
    allowed = None if generation.constraint is None else generation.constraint.masks(scheduled.drafts)

    def asked(draft_token_ids: Sequence[int], rows: slice) -> SampleRequest:
        return SampleRequest(
            params=generation.request.params,
            noise_key=generation.request.noise_key,
            token_ids=generation.token_ids,
            draft_token_ids=draft_token_ids,
            num_prompt_tokens=generation.num_prompt_tokens,
            num_rows=rows.stop - rows.start,
            position_shift=int(scheduled.has_unread_input),
            allowed=None if allowed is None else allowed[rows],
            counts=counts,
        )

    token_ids, parents = scheduled.drafts.token_ids, scheduled.drafts.parents
    if parents is None:
        yield asked(token_ids, slice(0, scheduled.num_choices))
    else:
        for node in range(-1, len(token_ids)):
            yield asked([token_ids[i] for i in path_to(node, parents)], slice(node + 1, node + 2))
