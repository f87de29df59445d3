"""Coupled sampling as a logits processor of vLLM's V2 runner.

To vLLM every request is greedy. This processor applies temperature and filters and adds noise, so that the argmax of
the logits is our choice. vLLM verifies drafts by comparing them with the argmax, which thus becomes the coupled rule.
vLLM applies bias and penalties itself, before this processor. Grammars, and all constraints of our target worker, are a
mask that this processor applies (`cluster.vllm.runner.bound_steps`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor

from cluster.speculation.device_noise import signed_word
from cluster.speculation.filters import NO_TOP_P, filter_rows
from cluster.speculation.params import SamplingParams
from cluster.speculation.sampling import noise_of_rows
from cluster.vllm.constraints import is_constrained
from cluster.vllm.coupling import Coupling
from cluster.vllm.runner.couplings import couplings_of

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcRequestState


class CoupledSampling(LogitsProcessor):
    """Logits processor that keeps the requests' parameters by slot on the logits' device: steps wait for no copy."""

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
        # Imported here, because the front end also imports this module, and must not import the runner.
        from cluster.vllm.runner.bound_steps import install

        install()
        self._couplings = couplings_of(req_states.all_token_ids)
        self._device = req_states.device
        self._host = _Slots.on_host(req_states.max_num_reqs)
        self._slots = self._host.to(self._device)
        self._is_stale = False

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        coupling = Coupling.of(sampling_params)
        self._couplings.put(req_idx, coupling)
        if coupling is None:  # a warm-up request of vLLM
            self._host.clear(req_idx)
        else:
            self._host.put(req_idx, coupling)
        self._is_stale = True
        has_mask = sampling_params.structured_outputs is not None or is_constrained(sampling_params)
        return coupling is not None and (has_mask or not coupling.params.is_greedy)

    def apply_staged_writes(self) -> None:
        if self._is_stale:
            self._slots = self._host.to(self._device)
            self._is_stale = False

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Adds noise to `logits`, float32 [num_rows, vocab_size].

        The row whose input is the token at `pos` draws the token at `pos + 1`.
        """
        if (mask := self._couplings.mask) is not None:
            self._couplings.mask = None
            mask(logits)
        found = map(self._couplings.get, ctx.idx_mapping_np.tolist())
        in_batch = [coupling.params for coupling in found if coupling is not None]
        if all(params.is_greedy for params in in_batch):
            return logits
        slots, rows = self._slots, ctx.expanded_idx_mapping
        logits /= slots.temperature[rows][:, None]
        has_min_p = any(params.has_filter and params.min_p > 0 for params in in_batch)
        has_top = any(params.has_filter and (params.top_k > 0 or params.top_p < 1.0) for params in in_batch)
        logits = filter_rows(
            logits,
            min_p=slots.min_p[rows] if has_min_p else None,
            top_k=slots.top_k[rows] if has_top else None,
            top_p=slots.top_p[rows] if has_top else None,
        )
        noise = noise_of_rows(slots.keys[rows], ctx.pos + 1, logits.shape[-1])
        logits += noise.mul_(slots.is_drawn[rows][:, None])
        return logits


@dataclass(frozen=True)
class _Slots:
    """Sampling parameters by slot, [max_num_reqs] each. The defaults leave logits unchanged."""

    temperature: torch.Tensor  # float32
    min_p: torch.Tensor  # float32
    top_p: torch.Tensor  # float32
    top_k: torch.Tensor  # int64
    is_drawn: torch.Tensor  # float32: 1, and 0 where the choice is greedy
    keys: torch.Tensor  # int64 [max_num_reqs, 2]

    @classmethod
    def on_host(cls, max_num_reqs: int) -> _Slots:
        return cls(
            temperature=torch.ones(max_num_reqs),
            min_p=torch.zeros(max_num_reqs),
            top_p=torch.full((max_num_reqs,), NO_TOP_P),
            top_k=torch.full((max_num_reqs,), np.iinfo(np.int64).max),
            is_drawn=torch.zeros(max_num_reqs),
            keys=torch.zeros((max_num_reqs, 2), dtype=torch.int64),
        )

    def to(self, device: torch.device) -> _Slots:
        """Returns a copy on `device`, because running steps still read the previous one."""
        tensors = (self.temperature, self.min_p, self.top_p, self.top_k, self.is_drawn, self.keys)
        return _Slots(*(tensor.to(device, copy=True) for tensor in tensors))

    def put(self, slot: int, coupling: Coupling) -> None:
        params, key = coupling.params, coupling.noise_key
        self._shape(slot, SamplingParams(temperature=0.0) if params.is_greedy else params)
        self.keys[slot, 0], self.keys[slot, 1] = signed_word(key.low), signed_word(key.high)

    def clear(self, slot: int) -> None:
        self._shape(slot, SamplingParams(temperature=0.0))

    def _shape(self, slot: int, params: SamplingParams) -> None:
        self.temperature[slot] = 1.0 if params.is_greedy else params.temperature
        self.min_p[slot] = params.min_p
        self.top_p[slot] = params.top_p if params.top_p < 1.0 else NO_TOP_P
        self.top_k[slot] = params.top_k if params.top_k > 0 else np.iinfo(np.int64).max
        self.is_drawn[slot] = 0.0 if params.is_greedy else 1.0
