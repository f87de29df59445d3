"""Drafts that arrive after their step was submitted, in the V2 runner of every rank.

The runner builds the input of a step from sampled tokens and drafts. Just before, this module replaces the drafts of
the runner's speculator, which are placeholders, with the drafts that the scheduler collected for the step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import vllm.v1.worker.gpu.model_runner as model_runner
import vllm.v1.worker.gpu.spec_decode.rejection_sampler as rejection_sampler
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator
from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

from cluster.speculation.device_copy import copy_to
from cluster.vllm.draft_gate import BOUND_STEP, BoundStep, DraftReader
from cluster.vllm.function_wrapping import wrap_function
from cluster.vllm.runner.couplings import SlotCouplings, known_couplings

Masks = npt.NDArray[np.int32]  # [num_rows, num_words]: one bit per token, 1 if it is allowed


@dataclass(slots=True)
class _Executed:
    """The last step that a runner of this process executed. Only one runner executes a step at a time."""

    states: Any = None  # request states of the runner
    couplings: SlotCouplings | None = None  # None: sampling is not coupled
    bound: BoundStep | None = None  # None: the step is not bound, or its drafts are written already


_last = _Executed()
_readers: dict[str, DraftReader] = {}  # by gate


def install() -> None:
    """Wraps the functions of vLLM's V2 runner. Calling it repeatedly is safe."""
    wrap_function(model_runner.GPUModelRunner, "execute_model", _execute_model)
    wrap_function(model_runner, "combine_sampled_and_draft_tokens", _combine)
    wrap_function(StructuredOutputsWorker, "apply_grammar_bitmask", _keep_mask)
    wrap_function(rejection_sampler, "get_max_chunk_logits", _max_chunk_logits)


def _execute_model(
    original: Callable[..., Any], runner: Any, scheduler_output: Any, *arguments: Any, **options: Any
) -> Any:
    states = runner.req_states
    _last.states, _last.couplings = states, known_couplings(states.all_token_ids)
    _last.bound = getattr(scheduler_output, BOUND_STEP, None)
    return original(runner, scheduler_output, *arguments, **options)


def _combine(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Writes the drafts of a bound step into the runner's table. On a GPU, later work in the stream waits for them."""
    bound, states = _last.bound, _last.states
    if bound is not None:
        _last.bound = None
        if bound.gate not in _readers:
            _readers[bound.gate] = DraftReader(bound, states.device)
        slots = [states.req_id_to_index[request_id] for request_id in bound.request_ids]
        (places,) = copy_to(states.device, [slots])
        states.draft_tokens[places] = _readers[bound.gate].read(bound)
    return original(*arguments, **options)


def _keep_mask(
    original: Callable[..., None],
    worker: Any,
    logits: torch.Tensor,
    input_batch: Any,
    grammar_req_ids: Sequence[str],
    grammar_bitmask: Masks,
) -> None:
    """Defers the mask until sampling. Sampling changes a copy of the logits, so log-probabilities cover all tokens."""
    if _last.couplings is None:
        original(worker, logits, input_batch, grammar_req_ids, grammar_bitmask)
        return
    num_rows = len(logits)
    if hasattr(worker, "num_bonus_tokens"):  # vLLM 0.32
        grammar_bitmask = _scheduled_rows(grammar_bitmask, worker.mask_stride, input_batch, grammar_req_ids)

    def mask(processed: torch.Tensor) -> None:
        assert len(processed) == num_rows, "a step's logits are processed as a whole"
        original(worker, processed, input_batch, grammar_req_ids, grammar_bitmask)

    _last.couplings.mask = mask


def _scheduled_rows(masks: Masks, stride: int, input_batch: Any, request_ids: Sequence[str]) -> Masks:
    """Returns `masks` in the format of vLLM 0.32: only the rows that have logits.

    From 0.33 on, each of `request_ids` has `stride` rows. `masks` may be in either format.
    """
    if len(masks) != stride * len(request_ids):
        return masks
    num_rows = dict(zip(input_batch.req_ids, np.diff(input_batch.cu_num_logits_np), strict=True))
    has_logits = np.concatenate([np.arange(stride) < num_rows[request_id] for request_id in request_ids])
    scheduled: Masks = masks[has_logits]
    return scheduled


def _max_chunk_logits(original: Callable[..., int], *arguments: Any) -> int:
    """Returns an unlimited chunk size if there is a mask, because a mask covers all rows of a step."""
    has_mask = _last.couplings is not None and _last.couplings.mask is not None
    return sys.maxsize if has_mask else original(*arguments)


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
