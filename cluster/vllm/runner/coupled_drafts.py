"""Drafts that vLLM's V2 runner makes on its device, drawn under the noise of the target.

`couple` replaces the sampling of drafts in vLLM's speculators that have a draft model (EAGLE, MTP, `draft_model`). If
draft model and target have the same distribution, a draft then equals the target's choice, as with a draft worker.

`RecordedSpeculator` replaces vLLM's speculator of the method `draft_model`. It runs recorded CUDA graphs, and its depth
may change with every step. vLLM's speculator launches every kernel by itself, and always drafts to the full depth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.parallel_state import graph_capture
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from cluster.engine.step_graphs import CudaRecorder
from cluster.speculation.params import SamplingParams
from cluster.speculation.triton_sampler import LOGIT_ROW, POSITION, draw, empty_table, row_of
from cluster.vllm.runner.couplings import SlotCouplings, couplings_of

_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # maximum batch of recorded drafts


class CoupledDraw:
    """Draws drafts for the requests in a runner's slots, with their temperature, filters and noise.

    Ignores biases and penalties.
    """

    def __init__(self, max_num_reqs: int, couplings: SlotCouplings, device: torch.device) -> None:
        self._couplings = couplings
        self._num_changes = 0  # value of `SlotCouplings.num_changes` at the last copy to `_table`
        self._table = empty_table(max_num_reqs, device)  # one row per slot
        self._host = np.array(self._table.rows.cpu())

    def refresh(self) -> None:
        """Copies the couplings of new requests to the device. Must not be part of a recorded graph."""
        if self._num_changes == self._couplings.num_changes:
            return
        self._num_changes = self._couplings.num_changes
        for slot in range(len(self._host)):
            coupling = self._couplings.get(slot)
            if coupling is not None:
                own = coupling.params
                shape = SamplingParams(temperature=own.temperature, top_k=own.top_k, top_p=own.top_p, min_p=own.min_p)
                self._host[slot] = row_of(shape, coupling.noise_key)
        self._table.rows.copy_(torch.from_numpy(self._host), non_blocking=True)

    def __call__(self, logits: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Returns drafts, int64 [num_rows].

        `logits` [num_rows, vocab_size]: logits after the tokens at `positions`.
        """
        rows = self._table.rows[slots]
        rows[:, POSITION] = positions + 1
        rows[:, LOGIT_ROW] = torch.arange(len(rows), device=rows.device)
        token_ids, _ = draw(logits, replace(self._table, rows=rows), 1)
        return token_ids[:, 0].clamp_(max=logits.shape[-1] - 1)  # logits that are not numbers choose no token


def couple(speculator: Any, req_states: Any) -> None:
    """Makes `speculator` draw under the noise of the requests in `req_states`.

    `speculator` must be one of vLLM's speculators with a draft model.
    """
    draw_drafts = CoupledDraw(req_states.max_num_reqs, couplings_of(req_states.all_token_ids), req_states.device)
    propose = speculator.propose

    def sample_draft(
        hidden_states: torch.Tensor,
        sample_src_positions: torch.Tensor,
        idx_mapping: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        draft_step: torch.Tensor,
        draft_logits: torch.Tensor | None,
        spec_step_idx: int = 0,
        **unused: Any,
    ) -> torch.Tensor:
        logits = speculator.compute_draft_logits(hidden_states, spec_step_idx)
        return draw_drafts(logits, sample_src_positions, idx_mapping)

    def refreshed(*arguments: Any, **options: Any) -> torch.Tensor:
        draw_drafts.refresh()
        drafts: torch.Tensor = propose(*arguments, **options)
        return drafts

    speculator.sample_draft = sample_draft
    speculator.propose = refreshed


@dataclass(frozen=True)
class _Batch:
    """Inputs of the first draft of `num_reqs` sequences after a step, at fixed addresses."""

    num_reqs: int
    num_tokens: int
    input_ids: torch.Tensor
    positions: torch.Tensor
    query_start_loc: torch.Tensor
    query_start_loc_np: np.ndarray[Any, np.dtype[np.int32]]
    seq_lens: torch.Tensor
    seq_lens_cpu_upper_bound: torch.Tensor
    idx_mapping: torch.Tensor


class RecordedSpeculator(StandaloneARSpeculator):
    """Drafts with a draft model.

    A pass over the new committed tokens gives the first draft of each sequence. Each further draft takes another pass.
    """

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        number = self.max_num_reqs
        self._is_recorded = False
        # Graphs by number of sequences: for the first drafts after a step without long prompts, and for one more draft.
        self.recorded_first: dict[int, Callable[[], None]] = {}
        self.recorded_further: dict[int, Callable[[], None]] = {}
        self._num_rejected = torch.zeros(number, dtype=torch.int32, device=device)
        # Rows that pad a recorded size have slot -1, and read the element before the first.
        self._last_sampled = torch.zeros(number + 1, dtype=torch.int32, device=device)[1:]
        self._drafts = torch.zeros(number, dtype=torch.int64, device=device)  # last drafts of every sequence
        self._longest = torch.full((number,), self.max_model_len, dtype=torch.int32)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        self._is_recorded = self.device.type == "cuda" and cudagraph_mode.has_full_cudagraphs()

    @torch.inference_mode()
    def capture(self) -> None:
        if not self._is_recorded:
            return
        width = self.num_speculative_steps + 1  # maximum rows of a decoding sequence
        self.idx_mapping.fill_(-1)
        with graph_capture(device=self.device):
            record = CudaRecorder()
            for size in reversed(_SIZES):
                if size <= self.max_num_reqs and size * (width + 1) <= self.max_num_tokens:
                    first = partial(self.draft_first, self._static_batch(size, width))
                    self.recorded_first[size] = record(first)
                    self.recorded_further[size] = record(partial(self.draft_further, size))

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """Returns int64 [num_reqs, K]; the first `num_speculative_tokens` columns are drafts."""
        if dummy_run:
            warming: torch.Tensor = super().propose(
                input_batch,
                attn_metadata,
                slot_mappings,
                last_hidden_states,
                aux_hidden_states,
                num_sampled,
                num_rejected,
                last_sampled,
                next_prefill_tokens,
                temperature,
                seeds,
                dp_sync_state,
                dummy_run,
                skip_attn_for_dummy_run,
            )
            return warming
        number = input_batch.num_reqs
        depth = self.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens
        drafts: torch.Tensor = self.draft_tokens[:number]
        if depth == 0:
            return drafts
        self._copy_request_inputs(number, input_batch.idx_mapping, temperature, seeds)
        self._num_rejected[:number].copy_(num_rejected[:number])
        self._num_rejected[number:].zero_()
        self._last_sampled.copy_(last_sampled.view(-1))
        is_short = input_batch.num_scheduled_tokens.max() <= self.num_speculative_steps + 1
        first = _at_least(number, self.recorded_first) if is_short else None
        further = _at_least(number, self.recorded_further) or partial(self.draft_further, number)
        if first is None:
            self.draft_first(input_batch)
        else:
            first()
        drafts[:, 0] = self._drafts[:number]
        for place in range(1, depth):
            further()
            drafts[:, place] = self._drafts[:number]
        return drafts

    def _static_batch(self, num_reqs: int, width: int) -> _Batch:
        buffers, num_tokens = self.target_input_buffers, num_reqs * width
        starts = np.arange(num_reqs + 1, dtype=np.int32) * width
        buffers.query_start_loc[: num_reqs + 1].copy_(torch.from_numpy(starts))
        buffers.query_start_loc[num_reqs + 1 :].fill_(num_tokens)
        buffers.positions[:num_tokens].zero_()
        buffers.seq_lens[:num_reqs].fill_(width)
        return _Batch(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            input_ids=buffers.input_ids[:num_tokens],
            positions=buffers.positions[:num_tokens],
            query_start_loc=buffers.query_start_loc[: num_reqs + 1],
            query_start_loc_np=starts,
            seq_lens=buffers.seq_lens[:num_reqs],
            seq_lens_cpu_upper_bound=self._longest[:num_reqs],
            idx_mapping=self.idx_mapping[:num_reqs],
        )

    def draft_first(self, batch: Any) -> None:
        """Drafts the first token after the committed tokens of `batch`, and sets the inputs of further drafts."""
        number, buffers = batch.num_reqs, self.input_buffers
        self._prefill(batch, self._num_rejected[:number], self._last_sampled, number, False, None)
        self._drafts[:number] = self.draft_tokens[:number, 0]
        buffers.positions[:number].copy_(self.expanded_positions[self.last_token_indices[:number]])
        lengths = batch.seq_lens[:number] - self._num_rejected[:number] + 1
        buffers.seq_lens[:number].copy_(lengths.clamp(max=self.max_model_len))
        buffers.query_start_loc.copy_(self.arange_gpu)  # all: rows that pad a recorded size are sequences of one token

    def draft_further(self, number: int) -> None:
        """Drafts one more token for each of `number` sequences."""
        buffers = self.input_buffers
        token_ids, positions = buffers.input_ids[:number], buffers.positions[:number]
        lengths, slots = buffers.seq_lens[:number], self.idx_mapping[:number]
        token_ids.copy_(self._drafts[:number])
        positions.add_(1).clamp_(max=self.max_model_len - 1)
        lengths.add_(1).clamp_(max=self.max_model_len)
        mappings = self.block_tables.compute_slot_mappings(
            slots, buffers.query_start_loc[: number + 1], positions, number
        )
        metadata = self._build_uniform_attn_metadata(
            batch_desc=BatchExecutionDescriptor(cg_mode=CUDAGraphMode.NONE, num_tokens=number, num_reqs=number),
            num_reqs=number,
            num_query_per_req=1,
            seq_lens_cpu_upper_bound=self._longest,
            step=0,
        )
        by_layer = build_slot_mappings_by_layer(mappings, self.kv_cache_config)
        states = self._run_model(token_ids, positions, metadata, by_layer, None)
        self._drafts[:number] = self.sample_draft(
            states, positions, slots, self.temperature, self.seeds, self.current_draft_step, None
        )


def _at_least(number: int, recorded: Mapping[int, Callable[[], None]]) -> Callable[[], None] | None:
    """Returns the recorded call of the smallest sufficient size; None if all are too small."""
    size = min((size for size in recorded if size >= number), default=None)
    return None if size is None else recorded[size]
