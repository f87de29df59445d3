"""Every target engine there is, by the name it has in the configuration."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from cluster.config import Config, EngineName
from cluster.coordination.pool import DraftPool
from cluster.drafters.registry import load_draft_model
from cluster.engine.blocks import BlockManager
from cluster.engine.invariance import check_invariance
from cluster.engine.kv_cache import block_bytes
from cluster.engine.limits import StepLimits
from cluster.engine.loader import Progress
from cluster.engine.model_config import ModelConfig
from cluster.engine.runner import ModelRunner, kv_cache_budget
from cluster.errors import ConfigurationError
from cluster.model_folder import resolve_model_folder
from cluster.place import Place
from cluster.targets.base import Target
from cluster.targets.rejection import RejectionSampler
from cluster.targets.simulated import SimulatedTarget
from cluster.targets.torch import TorchTarget
from cluster.transport.dialing import Dialer
from cluster.vllm.compatibility import TARGET, check
from cluster.vllm.engine_args import set_environment


def make_target(config: Config, tokenizer_fingerprint: str, progress: Progress | None = None) -> Target:
    """The engine that `config` names, its model loaded, for drafts of tokens with that fingerprint.

    Raises ConfigurationError.
    """
    target = config.target
    if target.max_num_batched_tokens < target.max_num_seqs:
        raise ConfigurationError(
            f"target.max_num_batched_tokens {target.max_num_batched_tokens} is less than "
            f"target.max_num_seqs {target.max_num_seqs}: every sequence needs a token in every step"
        )
    return _ENGINES[target.engine](config, tokenizer_fingerprint, progress)


def _torch(config: Config, fingerprint: str, progress: Progress | None) -> Target:
    target = config.target
    runner = ModelRunner.from_config(target, dtype_on_cpu=torch.bfloat16, progress=progress)
    if target.numerics == "invariant":
        check_invariance(runner)
    rejection = _rejection(config, runner) if config.speculation.acceptance == "rejection" else None
    limits = StepLimits.of(target, runner.model.config.resolve_max_model_len(target.max_model_len))
    return TorchTarget(target.model, runner, limits, _pool(config, fingerprint), config.speculation, rejection)


def _pool(config: Config, fingerprint: str) -> DraftPool:
    return DraftPool(
        fingerprint,
        Place.own(config.placement, os.environ),
        config.placement.trial_share,
        Dialer.of(config.tls, "target", config.draft.tls_server_name),
    )


def _rejection(config: Config, target: ModelRunner) -> RejectionSampler | None:
    """With a copy of the draft, as its worker loads it; None where nothing is drafted."""
    if config.speculation.num_speculative_tokens == 0:
        return None
    draft = load_draft_model(config)
    draft_size, target_size = draft.model.config.vocab_size, target.model.config.vocab_size
    if draft_size != target_size:
        raise ConfigurationError(
            f"speculation.acceptance rejection needs one vocabulary: the draft's has {draft_size} tokens, the target's "
            f"{target_size}"
        )
    max_model_len = draft.model.config.resolve_max_model_len(config.draft.max_model_len)
    return RejectionSampler(draft, StepLimits.of(config.draft, max_model_len))


def _vllm(config: Config, fingerprint: str, progress: Progress | None) -> Target:
    set_environment(config.target)  # vLLM reads some of it when it is imported
    check(TARGET)
    from cluster.targets.vllm.target import VllmTarget  # and only this engine needs it

    return VllmTarget(config, fingerprint)


def _simulated(config: Config, fingerprint: str, progress: Progress | None) -> Target:
    """With as many KV blocks as the model would have in bfloat16. No weights are read."""
    target = config.target
    model = ModelConfig.from_folder(resolve_model_folder(target.model))
    num_blocks = kv_cache_budget(target, torch.device("cpu")) // block_bytes(model, target.block_size, torch.bfloat16)
    return SimulatedTarget(
        config.simulation,
        config.simulation.vocab_size or model.vocab_size,
        StepLimits.of(target, target.max_model_len or model.max_position_embeddings),
        BlockManager(num_blocks, target.block_size, enable_prefix_caching=target.enable_prefix_caching),
        _pool(config, fingerprint),
        config.speculation,
    )


_ENGINES: dict[EngineName, Callable[[Config, str, Progress | None], Target]] = {
    "torch": _torch,
    "vllm": _vllm,
    "simulated": _simulated,
}
