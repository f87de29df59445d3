"""Coupled sampling in vLLM's V1 runner: our sampler and verifier replace vLLM's on every rank.

vLLM creates its workers with `worker_extension_cls=EXTENSION`, and then `install_coupled_sampling` is called. The
request's `Coupling` determines the distribution and the noise of a row; vLLM's own parameters are neutral. The logits
are raw, so this module also masks forbidden tokens. Each rank computes the same choices.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from cluster.speculation import sampling
from cluster.speculation.drafts import Drafts
from cluster.speculation.sampling import SampleRequest
from cluster.speculation.token_counts import TokenCounts
from cluster.vllm.constraints import RequestConstraints
from cluster.vllm.coupling import Coupling
from cluster.vllm.runner.lora_worker import LoraWorker

EXTENSION = "cluster.vllm.runner.sampling.CoupledWorker"
_NO_LIMIT = 1 << 30


class CoupledWorker(LoraWorker):
    """Extension of a vLLM worker with coupled sampling."""

    def install_coupled_sampling(self) -> None:
        """Installs the sampler and the verifier. Called once, before the first request."""
        runner = self.model_runner
        assert not runner.use_async_scheduling, "coupled sampling reads committed tokens on the host"
        self._coupled_requests = requests = _Requests(runner)
        runner.sampler = CoupledSampler(runner.sampler, requests)
        if runner.speculative_config is not None:
            runner.rejection_sampler = CoupledVerifier(runner.rejection_sampler, runner.sampler, requests)
            if runner.speculative_config.method == "custom_class":
                # The proposer has no model, so it has no limit. With a limit, one sequence near it would end drafting
                # for the whole batch.
                runner.effective_drafter_max_model_len = _NO_LIMIT

    def know_grammar_vocabulary(self, written: str) -> None:
        """Sets the vocabulary. Called before the first request with a grammar."""
        self._coupled_requests.constraints.know_vocabulary(written)


class _Requests:
    """Converts the requests of a step for sampling."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._couplings: dict[str, Coupling] = {}
        self._counts: dict[str, TokenCounts] = {}  # by ID of requests with penalties
        self._vocab_size = runner.model_config.get_vocab_size()
        self.constraints = RequestConstraints(self._vocab_size)

    def of_step(self, num_draft_tokens: list[int] | None = None) -> list[SampleRequest]:
        """Returns a sample request for each request, with a row per draft and one more."""
        batch = self._runner.input_batch
        requests = []
        for index, request_id in enumerate(batch.req_ids):
            num_tokens = int(batch.num_tokens_no_spec[index])
            num_drafts = num_draft_tokens[index] if num_draft_tokens is not None else 0
            coupling = self._coupling(request_id)
            counts = self._count(request_id, coupling, batch.token_ids_cpu[index], num_tokens)
            drafts = batch.spec_token_ids[index][:num_drafts] if num_drafts else ()
            generated = batch.token_ids_cpu[index, coupling.num_prompt_tokens : num_tokens]
            constraint = self.constraints.of(request_id, self._params(request_id), generated)
            requests.append(
                SampleRequest(
                    params=coupling.params,
                    noise_key=coupling.noise_key,
                    token_ids=range(num_tokens),  # only penalties use them, and `counts` has them
                    num_prompt_tokens=coupling.num_prompt_tokens,
                    num_rows=num_drafts + 1,
                    draft_token_ids=drafts,
                    allowed=None if constraint is None else constraint.masks(Drafts(drafts)),
                    counts=counts,
                )
            )
        return requests

    def _coupling(self, request_id: str) -> Coupling:
        coupling = self._couplings.get(request_id)
        if coupling is None:
            running = self._runner.requests
            self._couplings = {known: found for known, found in self._couplings.items() if known in running}
            self._counts = {known: found for known, found in self._counts.items() if known in running}
            self.constraints.keep_only(running)
            coupling = Coupling.of(self._params(request_id))
            assert coupling is not None, f"request {request_id} has no sampling parameters"
            self._couplings[request_id] = coupling
        return coupling

    def _count(
        self, request_id: str, coupling: Coupling, token_ids: npt.NDArray[np.int32], num_tokens: int
    ) -> TokenCounts | None:
        if not coupling.params.has_penalty:
            return None
        counts = self._counts.get(request_id)
        if counts is None:
            counts = self._counts[request_id] = TokenCounts(self._vocab_size, self._runner.device)
        counts.count(token_ids, num_tokens, coupling.num_prompt_tokens)
        return counts

    def _params(self, request_id: str) -> Any:
        return self._runner.requests[request_id].sampling_params


class CoupledSampler(Sampler):
    """vLLM's sampler with coupled sampling."""

    def __init__(self, original: Sampler, requests: _Requests) -> None:
        self.__dict__.update(original.__dict__)  # instead of calling the constructor, which differs between versions
        self._requests = requests
        self._sampler: sampling.Sampler | None = None

    def best(self, logits: torch.Tensor, requests: list[SampleRequest]) -> torch.Tensor:
        """Returns the choice of every row, int64 [num_rows], on the device of `logits`."""
        if self._sampler is None:
            self._sampler = sampling.Sampler(logits.device)
        token_ids, _ = self._sampler.best_tokens(logits, requests, 1)
        return token_ids.flatten()

    def sample(
        self, logits: torch.Tensor, sampling_metadata: SamplingMetadata, logprobs_mode_override: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.best(logits, self._requests.of_step()), None


class CoupledVerifier(RejectionSampler):
    """Accepts a draft if the target chooses the same token. Never resamples: choices do not depend on drafts."""

    def __init__(self, original: RejectionSampler, sampler: CoupledSampler, requests: _Requests) -> None:
        self.__dict__.update(original.__dict__)  # instead of calling the constructor, which differs between versions
        self.sampler = sampler
        self._requests = requests

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Returns the committed tokens in vLLM's format: int32 [num_requests, max_drafts + 1], padded with -1.

        Ignores `draft_probs`.
        """
        choices = self.sampler.best(logits, self._requests.of_step(metadata.num_draft_tokens))
        output = accepted(choices, metadata)
        logprobs = None
        if sampling_metadata.max_num_logprobs is not None:
            logprobs = self._get_logprobs_tensors(
                sampling_metadata.max_num_logprobs,
                metadata,
                logits,
                logits[metadata.target_logits_indices],
                logits[metadata.bonus_logits_indices],
                output,
            )
        return SamplerOutput(sampled_token_ids=output, logprobs_tensors=logprobs)


def accepted(choices: torch.Tensor, metadata: SpecDecodeMetadata) -> torch.Tensor:
    """Returns the committed choices of each request: the accepted drafts and the next token (`count_accepted`).

    `choices` [num_drafts + num_requests]: the rows of each request are consecutive. Runs on the device, and copies
    nothing to the host.
    """
    device, width = choices.device, metadata.max_spec_len + 1
    starts = metadata.cu_num_sampled_tokens - metadata.cu_num_sampled_tokens.diff(
        prepend=metadata.cu_num_sampled_tokens.new_zeros(1)
    )
    places = starts[:, None] + torch.arange(width, device=device)
    is_row = places < metadata.cu_num_sampled_tokens[:, None]
    rows = choices.to(torch.int32)[places.clamp(max=len(choices) - 1)]  # [num_requests, width]
    drafts = choices.new_full((len(choices),), PLACEHOLDER_TOKEN_ID, dtype=torch.int32)
    drafts[metadata.target_logits_indices.long()] = metadata.draft_token_ids.to(torch.int32)
    is_right = rows == drafts[places.clamp(max=len(choices) - 1)]
    is_reached = torch.ones_like(is_right)
    is_reached[:, 1:] = is_right[:, :-1].cumprod(dim=1).bool()
    return rows.masked_fill(~(is_reached & is_row), PLACEHOLDER_TOKEN_ID)
