"""Speculator of vLLM's V2 runner whose drafts come from our draft workers.

vLLM is configured with the method `ngram_gpu`, and this speculator replaces the one of that method. Every step verifies
k drafts of each sequence, as with all of vLLM's speculators. Rows with fewer drafts are padded with their last token.
Only the first rank of a tensor-parallel group has links; it broadcasts the drafts to the other ranks.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.distributed import get_tp_group
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from cluster.coordination.pool import DraftPool
from cluster.model_folder import resolve_model_folder
from cluster.tokenization import Tokenizer
from cluster.transport.dialing import Dialer
from cluster.vllm import compatibility
from cluster.vllm.v2.requests import EngineRequests
from cluster.vllm.v2.settings import PluginSettings


def make_speculator(vllm_config: Any, device: torch.device, req_states: Any) -> BaseSpeculator:
    """Returns the speculator, in place of vLLM's `init_speculator`. Raises ConfigurationError."""
    compatibility.check(compatibility.V2_WORKER)
    _log_as_vllm_does()
    settings = PluginSettings.of(vllm_config.additional_config)
    requests = None
    if get_tp_group().is_first_rank:
        tokenizer = Tokenizer(resolve_model_folder(vllm_config.model_config.tokenizer))
        dialer = Dialer.of(settings.tls, "target", settings.draft_server_name)
        requests = EngineRequests(vllm_config, settings, req_states, DraftPool(tokenizer.fingerprint(), dialer=dialer))
        requests.start()
    return RemoteSpeculator(settings.num_speculative_tokens, device, requests)


def _log_as_vllm_does() -> None:
    """Makes our loggers use vLLM's log handlers, which otherwise only cover vLLM's modules."""
    ours = logging.getLogger("cluster")
    if not ours.handlers:
        ours.handlers = logging.getLogger("vllm").handlers
        ours.setLevel(logging.INFO)
        ours.propagate = False


class RemoteSpeculator(BaseSpeculator):
    """Speculator that gets its drafts from draft workers, as described in the module."""

    supports_mm_inputs = False
    draft_logits = None  # token IDs only
    pcp_manager = None  # assigned by the model runner

    def __init__(self, num_speculative_tokens: int, device: torch.device, requests: EngineRequests | None) -> None:
        """`requests`: only on the first rank; None on the others."""
        self._k = num_speculative_tokens
        self._device = device
        self._requests = requests

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Does nothing: no graph is captured."""

    def capture(self) -> None:
        """Does nothing: no graph is captured."""

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
        """Returns the drafts after the tokens that the step has sampled, int64 [num_reqs, k]."""
        if dummy_run:
            return torch.zeros((input_batch.num_reqs, self._k), dtype=torch.int64, device=self._device)
        drafts = last_sampled.view(-1)[input_batch.idx_mapping].unsqueeze(1).repeat(1, self._k)
        if self._requests is not None:
            rows = self._requests.after_step(input_batch, num_sampled, self._k)
            if rows is not None:
                drafts = torch.tensor(rows, dtype=torch.int64).to(self._device)
        tp_group = get_tp_group()
        if tp_group.world_size > 1:
            drafts = tp_group.broadcast(drafts, src=0)
        return drafts
