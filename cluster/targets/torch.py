"""The PyTorch target: a step is a forward pass over the paged KV cache, and sampling under the shared noise."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from cluster.config.speculation import SpeculationConfig
from cluster.constraints import UNCONSTRAINED
from cluster.coordination.base import LinkPool
from cluster.coordination.coordinator import StepTiming
from cluster.coordination.sequence import Round, SpeculativeSequence
from cluster.drafters.target_states import ComputedSequence, TargetStates
from cluster.engine.batch import Segment, Unread
from cluster.engine.limits import StepLimits
from cluster.engine.prompt_pace import PromptPart
from cluster.engine.runner import ModelRunner
from cluster.errors import InvalidRequestError
from cluster.logprobs import TokenLogprobs
from cluster.speculation.device_copy import HostCopy
from cluster.speculation.drafts import Drafts
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.speculation.sampling import Sampler
from cluster.speculation.scoring import token_logprobs
from cluster.speculation.tuning import TRIAL_REPEATS
from cluster.targets.base import GenerationOutput, GenerationRequest, TargetModel
from cluster.targets.rejection import RejectionSampler
from cluster.targets.step_loop import ReadChoices, StepLoop
from cluster.targets.step_sampling import logits_of_choices, sample_requests
from cluster.targets.token_generator import Generation, Scheduled

if TYPE_CHECKING:
    from cluster.targets.device_speculator import DeviceSpeculator  # needs Triton, which builds for CPUs lack

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
        speculator: DeviceSpeculator | None = None,
    ) -> None:
        """`rejection`: decides acceptance; None: coupled acceptance. `states`: read by the pool's drafter.

        `speculator`: drafts in the steps of `runner`; the pool then has no draft workers.
        """
        dtype, config = str(runner.model.dtype).removeprefix("torch."), runner.model.config
        model = TargetModel(name, dtype, config.vocab_size, config.eos_token_ids)
        super().__init__(model, limits, runner.blocks, pool, speculation)
        self._runner = runner
        self._sampler = Sampler(runner.model.device)
        self._rejection = rejection
        self._speculator = speculator
        self._logits = torch.empty(0)  # logits of the step
        self._choices = torch.empty(0)  # choices of the step, on the device
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

    def profile(self) -> None:
        super().profile()
        if self._speculator is None:
            return
        for depth in self._speculator.trial_depths():
            params, num_tokens = SamplingParams(temperature=0.0), TRIAL_REPEATS * (1 + depth)
            self.submit(
                GenerationRequest(f"trial of depth {depth}", [0], 1, params, NoiseKey(0, 0), num_tokens, True, depth)
            )
            while self.run_step(lambda outputs: None):
                pass
        self._reset_metrics()

    def _launch(self, step: Sequence[Scheduled]) -> ReadChoices:
        if self._speculator is not None:
            self._logits, read = self._speculator.launch(step)
            return read
        segments = [part.segment(self._unread_choice(part)) for part in step]
        is_unread = any(part.has_unread_input for part in step)
        self._logits = self._runner.run(segments, Unread(self._choices) if is_unread else None)
        logits = logits_of_choices(self._logits, step)
        requests = sample_requests(step, self.model.vocab_size, self._runner.model.device)
        ids = self._sampler.best_tokens(logits, requests, 1)[0].flatten() if requests else logits.new_empty(0)
        copy, rejection = HostCopy(ids), self._rejection
        if self.launches_ahead:
            choosing = (part.sequence for part in step if part.yields_choices)
            self._choices, self._choice_of = ids, {sequence: index for index, sequence in enumerate(choosing)}
        return copy.read if rejection is None else lambda: rejection.revise(copy.read(), logits, step)

    def _unread_choice(self, part: Scheduled) -> int | None:
        """Returns the stand-in (`Unread`) for the input of `part`; None if the host knows the input."""
        return -1 - self._choice_of[part.sequence] if part.has_unread_input else None

    def _drafts_of(self, generation: Generation, collected: Mapping[SpeculativeSequence, Drafts]) -> Drafts:
        if self._speculator is None:
            return super()._drafts_of(generation, collected)
        return self._speculator.drafts_of(generation)

    def _commit(self, step: Sequence[Scheduled], choices: Sequence[int]) -> tuple[list[Round], list[GenerationOutput]]:
        rounds, outputs = super()._commit(step, choices)
        if self._speculator is not None:
            self._speculator.observe_rounds(rounds)
        return rounds, outputs

    def _time(
        self, step: Sequence[Scheduled], prompts: Sequence[PromptPart], num_rows: int, seconds: float
    ) -> StepTiming:
        if self._speculator is not None:
            self._speculator.observe_step(num_rows, seconds, is_pure=not prompts)
        return super()._time(step, prompts, num_rows, seconds)

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
        if self._speculator is not None:
            self._speculator.forget(generation)

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
