"""The requests in the slots of vLLM's V2 runner, and their drafts. Runs only on the rank that has the links.

A failure in this module must not stop the engine, which continues without drafts. Log and metrics report the failure.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, ParamSpec

import torch

from cluster.coordination.coordinator import Coordinator
from cluster.coordination.pool import DraftPool
from cluster.engine.limits import StepLimits
from cluster.telemetry.metrics import Reading, WorkerMetrics
from cluster.telemetry.metrics_page import PageGuard, serve_metrics
from cluster.transport.listening import Listener
from cluster.vllm.couplings import couplings_of
from cluster.vllm.v2.drafting import RemoteDrafting, Stepped
from cluster.vllm.v2.links import LinkThread
from cluster.vllm.v2.settings import PluginSettings

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")


def _guarded(
    method: Callable[Concatenate[EngineRequests, _P], Any],
) -> Callable[Concatenate[EngineRequests, _P], Any]:
    """Wraps a method: the first error turns speculation off until a restart. The wrapper then returns None."""

    @functools.wraps(method)
    def guarded(self: EngineRequests, /, *arguments: _P.args, **options: _P.kwargs) -> Any:
        if self.has_failed:
            return None
        try:
            return method(self, *arguments, **options)
        except Exception:
            self.has_failed = True
            logger.exception("speculation is off until a restart: requests are decoded without drafts")
            self.stop()
            return None

    return guarded


class EngineRequests:
    """Requests of one engine, as described in the module. `req_states`: the model runner's request states."""

    def __init__(self, vllm_config: Any, settings: PluginSettings, req_states: Any, pool: DraftPool) -> None:
        model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
        limits = StepLimits(model.max_model_len, scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        self.has_failed = False
        self._settings = settings
        self._pool = pool
        self._links = LinkThread(self._pool, settings.draft_addresses)
        coordinator = Coordinator(self._pool, settings.speculation, model.get_vocab_size(), limits)
        self._drafting = RemoteDrafting(coordinator)
        self._max_model_len = model.max_model_len
        self._model_name = str(model.served_model_name)
        self._req_states = req_states
        self._couplings = couplings_of(req_states.all_token_ids)
        self._added: dict[str, tuple[Sequence[int], int, int]] = {}  # requests that are not in a step yet
        self._watch(req_states)

    def start(self) -> None:
        """Starts the links and the metrics page. Raises ConfigurationError if the page's port is taken."""
        port = self._settings.metrics_port
        if port is not None:
            registry = WorkerMetrics(self.readings, self._model_name).registry
            settings = self._settings
            guard = PageGuard.of(Listener.of(settings.tls, "target"), settings.metrics_token_file)
            port = serve_metrics(registry, settings.metrics_host, port, guard)
            logger.info("metrics page of speculation at %s, port %d", self._settings.metrics_host, port)
        self._links.start()
        logger.info("draft workers: %s", ", ".join(self._settings.draft_addresses))

    def stop(self) -> None:
        self._links.stop()

    def _watch(self, req_states: Any) -> None:
        """Wraps the methods of `req_states` that add and remove requests, so that this object follows them."""
        add, write, remove = req_states.add_request, req_states.apply_staged_writes, req_states.remove_request

        @functools.wraps(add)
        def add_request(
            *, req_id: str, prompt_len: int, all_token_ids: list[int], max_tokens: int, **rest: Any
        ) -> None:
            add(req_id=req_id, prompt_len=prompt_len, all_token_ids=all_token_ids, max_tokens=max_tokens, **rest)
            if not self.has_failed:
                self._added[req_id] = (all_token_ids, prompt_len, prompt_len + max_tokens)

        @functools.wraps(write)
        def apply_staged_writes() -> None:  # after the sampler received the requests
            write()
            self._open()

        @functools.wraps(remove)
        def remove_request(req_id: str) -> Any:
            slot = remove(req_id)
            self._added.pop(req_id, None)
            if slot is not None:
                self._remove(req_id)
            return slot

        req_states.add_request = add_request
        req_states.apply_staged_writes = apply_staged_writes
        req_states.remove_request = remove_request

    @_guarded
    def _open(self) -> None:
        added, self._added = self._added, {}
        for request_id, (token_ids, num_prompt_tokens, max_len) in added.items():
            coupling = self._couplings.get(self._req_states.req_id_to_index[request_id])
            if coupling is not None:  # None: a warm-up request of vLLM
                max_len = min(max_len, self._max_model_len)
                self._drafting.add(request_id, token_ids, num_prompt_tokens, max_len, coupling)
        self._drafting.opened()

    @_guarded
    def _remove(self, request_id: str) -> None:
        self._drafting.remove(request_id)

    @_guarded
    def after_step(self, input_batch: Any, num_sampled: torch.Tensor, k: int) -> list[list[int]] | None:
        """Returns k draft tokens for every request of the batch; None if speculation has failed."""
        sampled = self._sampled(input_batch.idx_mapping, num_sampled, k)
        verified = input_batch.num_draft_tokens_per_req
        num_verified = [0] * len(sampled) if verified is None else verified.tolist()
        stepped = [Stepped(*part) for part in zip(input_batch.req_ids, sampled, num_verified, strict=True)]
        found = self._drafting.after_step(stepped)
        return [_filled(found.get(request_id, ()), token_ids, k) for request_id, token_ids, _ in stepped]

    def _sampled(self, slots: torch.Tensor, num_sampled: torch.Tensor, k: int) -> list[list[int]]:
        """Returns the tokens that each request got in this step.

        Copies once from the device, and so waits for the end of the step.
        """
        states = self._req_states
        start = states.total_len.gpu[slots] - num_sampled
        places = (start[:, None] + torch.arange(k + 1, device=slots.device)).clamp_(max=self._max_model_len - 1)
        token_ids = states.all_token_ids.gpu[slots[:, None], places]
        rows = torch.cat([num_sampled[:, None], token_ids], dim=1).tolist()
        return [row[1 : 1 + row[0]] for row in rows]

    def readings(self) -> Iterable[Reading]:
        """Yields metrics of the speculation and of the links. Thread-safe."""
        yield Reading(
            "outrider_speculation_failed", "1 after an error has turned speculation off.", float(self.has_failed)
        )
        yield from self._drafting.readings()
        yield from self._pool.readings()


def _filled(drafts: Sequence[int], sampled: Sequence[int], k: int) -> list[int]:
    """Returns the first k of `drafts`, padded to k tokens.

    The padding is the last draft or, without drafts, the last sampled token.
    Any token ID of the model could pad.
    """
    last = [*sampled[-1:], *drafts][-1:] or [0]
    return [*drafts[:k], *last * (k - len(drafts))]
