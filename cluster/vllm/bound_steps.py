"""Drafts that arrive after their step was submitted, in the V2 runner of every rank.

The runner builds the input of a step from sampled tokens and drafts. Just before, this module replaces the drafts of
the runner's speculator, which are placeholders, with the drafts that the scheduler collected for the step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import vllm.v1.worker.gpu.model_runner as model_runner
import vllm.v1.worker.gpu.spec_decode.rejection_sampler as rejection_sampler
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from cluster.vllm.async_scheduler import BOUND_STEP
from cluster.vllm.coupled_sampling import CoupledSampling
from cluster.vllm.draft_gate import BoundStep, DraftReader
from cluster.vllm.function_wrapping import wrap_function

_executing: BoundSteps | None = None  # the instance whose runner is executing a step; only one runner does at a time
_has_mask = False  # whether the next step to sample has a mask


class BoundSteps:
    """Fills the drafts into the bound steps of one runner."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._reader: DraftReader | None = None
        self._step: BoundStep | None = None
        self._execute_model = runner.execute_model
        runner.execute_model = self.execute_model
        wrap_function(model_runner, "combine_sampled_and_draft_tokens", _combine)
        wrap_function(rejection_sampler, "get_max_chunk_logits", _max_chunk_logits)
        (self._coupled,) = [own for own in runner.sampler.logits_processors if isinstance(own, CoupledSampling)]
        self._apply_mask = runner.structured_outputs_worker.apply_grammar_bitmask
        runner.structured_outputs_worker.apply_grammar_bitmask = self._keep_mask

    def execute_model(self, scheduler_output: Any, *arguments: Any, **options: Any) -> Any:
        global _executing
        self._step, _executing = getattr(scheduler_output, BOUND_STEP, None), self
        try:
            return self._execute_model(scheduler_output, *arguments, **options)
        finally:
            self._step = _executing = None

    def fill(self) -> None:
        """Writes the drafts of the current step into the runner's table. Does nothing if the step is not bound.

        On a GPU, later work in the current stream waits for the drafts.
        """
        step, self._step = self._step, None
        if step is None:
            return
        states = self._runner.req_states
        if self._reader is None:
            self._reader = DraftReader(step, states.device)
        slots = np.array([states.req_id_to_index[request_id] for request_id in step.request_ids], dtype=np.int64)
        places = async_tensor_h2d(slots, device=states.device)
        states.draft_tokens[places] = self._reader.read(step)

    def _keep_mask(self, logits: torch.Tensor, *arguments: Any) -> None:
        """Defers the mask until sampling, which works on a copy, so that log-probabilities cover all tokens."""
        global _has_mask
        num_rows = len(logits)

        def mask(processed: torch.Tensor) -> None:
            global _has_mask
            _has_mask = False
            assert len(processed) == num_rows, "a step's logits are processed as a whole"
            self._apply_mask(processed, *arguments)

        self._coupled.mask, _has_mask = mask, True


def _combine(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    if _executing is not None:
        _executing.fill()
    return original(*arguments, **options)


def _max_chunk_logits(original: Callable[..., int], *arguments: Any) -> int:
    """Returns an unlimited chunk size if there is a mask, because a mask covers all rows of a step."""
    return sys.maxsize if _has_mask else original(*arguments)


class NoSpeculator(BaseSpeculator):
    """A speculator that only proposes placeholders: drafts come with the steps that verify them."""

    supports_mm_inputs = False
    draft_logits = None  # token IDs only
    pcp_manager = None  # assigned by the model runner

    def __init__(self, max_num_reqs: int, num_speculative_tokens: int, device: torch.device) -> None:
        self._nothing = torch.zeros((max_num_reqs, num_speculative_tokens), dtype=torch.int64, device=device)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Does nothing: no graph is captured."""

    def capture(self) -> None:
        """Does nothing: no graph is captured."""

    def propose(self, input_batch: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        """Returns placeholder drafts, int64 [num_reqs, k]; no step verifies them."""
        return self._nothing[: input_batch.num_reqs]
