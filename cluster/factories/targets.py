"""Creates target engines by their names in the configuration."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from cluster.config import Config
from cluster.config.workers import EngineName, TargetConfig
from cluster.coordination.base import LinkPool
from cluster.coordination.pool import DraftPool
from cluster.drafters.base import Drafter
from cluster.drafters.head import HeadDrafter
from cluster.drafters.medusa import MedusaDrafter
from cluster.drafters.pairing import draft_vocabulary
from cluster.drafters.target_states import TargetStates
from cluster.engine.blocks import BlockManager
from cluster.engine.host_memory import host_cache_bytes, usable_length
from cluster.engine.invariance import check_invariance
from cluster.engine.kv_cache import block_bytes
from cluster.engine.limits import StepLimits
from cluster.engine.loader import LoadedModel, Progress, resolve_device
from cluster.engine.medusa import MedusaHeads
from cluster.engine.model_config import ModelConfig
from cluster.engine.runner import ModelRunner, kv_cache_budget, kv_cache_budgets, load_weights, recorded_bytes
from cluster.errors import ConfigurationError
from cluster.factories.drafters import (
    is_model,
    load_draft_model,
    load_draft_weights,
    load_heads,
    make_drafter,
    model_drafter,
)
from cluster.model_folder import resolve_model_folder
from cluster.targets.base import Target
from cluster.targets.in_process import InProcessPool
from cluster.targets.rejection import RejectionSampler
from cluster.targets.simulated import SimulatedTarget
from cluster.targets.torch import TorchTarget
from cluster.vllm.compatibility import TARGET, V2_TARGET, check
from cluster.vllm.engine_args import set_environment, wants_v2_runner

if TYPE_CHECKING:
    from cluster.targets.device_speculator import DeviceSpeculator  # needs Triton

logger = logging.getLogger(__name__)

# A draft model that reads fewer bytes of weights per step runs on one thread by default. More threads gain less than
# they lose to other work on the same cores. A step of the 2M draft took 0.21 ms with one thread and 0.23 ms with two.
# On a machine with other load it took 0.28 ms and 0.43 ms.
_BYTES_FOR_ALL_THREADS = 2**23


def make_target(config: Config, tokenizer_fingerprint: str, progress: Progress | None = None) -> Target:
    """Returns the engine that `config` names, with its model loaded. Raises ConfigurationError.

    The target only uses drafters whose tokenizer has the fingerprint `tokenizer_fingerprint`.
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
    loaded = load_weights(target, progress=progress, numerics=target.numerics)
    pool: LinkPool
    states = speculator = None
    if config.drafts_in_process and config.draft.in_process_threads == "device":
        runner, speculator = _with_speculator(config, loaded)
        pool = DraftPool.of(config, fingerprint)
    elif config.drafts_in_process and config.draft.reads_states:
        states, pool = _with_heads(config, loaded)
        runner = states.runner
    elif config.drafts_in_process:
        runner, pool = _with_drafter(config, loaded)
    else:
        runner, pool = _without_draft(loaded, target), DraftPool.of(config, fingerprint)
    if target.numerics == "invariant":
        check_invariance(runner)
    rejection = _rejection(config, runner) if config.speculation.acceptance == "rejection" else None
    longest = runner.model.config.resolve_max_model_len(target.max_model_len)
    token_bytes = block_bytes(loaded.config, 1, loaded.weights.dtype)
    limits = StepLimits.of(target, usable_length(target, longest, runner.blocks.num_blocks, token_bytes))
    return TorchTarget(target.model, runner, limits, pool, config.speculation, rejection, states, speculator)


def _without_draft(loaded: LoadedModel, target: TargetConfig) -> ModelRunner:
    """Returns the runner of a target that shares its device's memory with no draft model."""
    budget = kv_cache_budget(target, loaded, recorded_bytes(target, loaded))
    return ModelRunner.with_cache(loaded, target, budget)


def _with_drafter(config: Config, loaded: LoadedModel) -> tuple[ModelRunner, InProcessPool]:
    """Returns the target's runner and a pool with the drafter in its process. Raises ConfigurationError."""
    target, draft, device = config.target, config.draft, loaded.weights.device
    if not is_model(draft.drafter):
        return _without_draft(loaded, target), _in_process_pool(config, make_drafter(config))
    vocabulary = draft_vocabulary(config)
    draft_weights = load_draft_weights(config, target=loaded, vocabulary=vocabulary)
    of_target, of_draft = kv_cache_budgets(target, loaded, draft, draft_weights)
    runner = ModelRunner.with_cache(loaded, target, of_target)
    draft_runner = ModelRunner.with_cache(draft_weights, draft, of_draft)
    pool = _in_process_pool(
        config,
        model_drafter(config, draft_runner, vocabulary),
        has_device_of_its_own=draft_weights.weights.device != device,
        reads_much=draft_runner.model.num_bytes_read >= _BYTES_FOR_ALL_THREADS,
    )
    return runner, pool


def _with_speculator(config: Config, loaded: LoadedModel) -> tuple[ModelRunner, DeviceSpeculator]:
    """Returns the target's runner, and the speculator that drafts in its steps. Raises ConfigurationError."""
    target, draft, device = config.target, config.draft, loaded.weights.device
    setting = "draft.in_process_threads device"
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        raise ConfigurationError(f"{setting} needs a GPU and Triton: set in_process_threads to auto")
    from cluster.drafters.burst import Burst
    from cluster.targets.device_speculator import DeviceSpeculator

    if draft_vocabulary(config) is not None:
        raise ConfigurationError(f"{setting} needs a draft with the target's tokens: set in_process_threads to auto")
    weights = load_draft_weights(config, target=loaded)
    if weights.weights.device != device:
        raise ConfigurationError(f"{setting} needs the draft on the target's GPU: set draft.device to cuda")
    # The blocks of a sequence are the same in both caches.
    draft = draft.model_copy(update={"block_size": target.block_size, "kv_cache_bytes": None})
    of_target, _ = kv_cache_budgets(target, loaded, draft, weights)
    runner = ModelRunner.with_cache(loaded, target, of_target)
    bytes_per_block = block_bytes(weights.config, draft.block_size, weights.weights.dtype)
    draft_runner = ModelRunner.with_cache(weights, draft, runner.blocks.num_blocks * bytes_per_block)
    limits = StepLimits.of(draft, draft_runner.model.config.resolve_max_model_len(draft.max_model_len))
    burst = Burst.of(draft_runner, limits)
    if burst is None:
        raise ConfigurationError(
            f"{setting}: Triton's kernels do not support draft.model {draft.model}: set in_process_threads to auto"
        )
    return runner, DeviceSpeculator(runner, draft_runner, burst, limits, config.speculation)


def _with_heads(config: Config, loaded: LoadedModel) -> tuple[TargetStates, InProcessPool]:
    """Returns access to the target's hidden states, and a pool with the heads that draft from them."""
    target, draft = config.target, config.draft
    heads = load_heads(config, loaded)
    loaded = replace(loaded, config=replace(loaded.config, captured_layers=heads.captured_layers))
    max_model_len = loaded.config.resolve_max_model_len(draft.max_model_len)
    limits = StepLimits.of(draft, max_model_len)
    drafter: Drafter
    if isinstance(heads, MedusaHeads):
        states = TargetStates(_without_draft(loaded, target))
        drafter, num_bytes_read = MedusaDrafter(heads, limits, states), heads.num_bytes_read
    else:
        of_target, of_draft = kv_cache_budgets(target, loaded, draft, heads.model)
        states = TargetStates(ModelRunner.with_cache(loaded, target, of_target))
        runner = ModelRunner.with_cache(heads.model, draft, of_draft)
        drafter, num_bytes_read = HeadDrafter(heads, runner, limits, states), runner.model.num_bytes_read
    return states, _in_process_pool(config, drafter, reads_much=num_bytes_read >= _BYTES_FOR_ALL_THREADS)


def _in_process_pool(
    config: Config,
    drafter: Drafter,
    *,
    has_device_of_its_own: bool = False,
    reads_much: bool = False,
) -> InProcessPool:
    """Returns a pool with `drafter`.

    Raises ConfigurationError if `draft.in_process_threads` would let two threads record graphs on one GPU.
    """
    draft = config.draft
    is_shared = draft.in_process_threads == "shared" or (
        draft.in_process_threads == "auto" and not has_device_of_its_own
    )
    if not is_shared and not has_device_of_its_own and resolve_device(config.target.device).type == "cuda":
        raise ConfigurationError(
            "draft.in_process_threads own: two threads cannot record graphs on one GPU: set it to shared"
        )
    num_threads = draft.threads
    if num_threads is None and not (is_shared and reads_much):
        # With more than one thread, the drafter and the target would take turns in the kernels' thread pool.
        num_threads = 1
    names = {"simulated": "simulated", "eagle": draft.model, "medusa": draft.model}
    name = names.get(draft.drafter, config.draft_model)
    logger.info(
        "%s (%s) drafts in this process, %s; its KV cache has %d blocks of %d tokens",
        name,
        draft.drafter,
        "in turn with the target" if is_shared else "in a thread of its own",
        drafter.num_blocks,
        drafter.block_size,
    )
    return InProcessPool(drafter, name, config.speculation, num_threads, has_own_thread=not is_shared)


def _rejection(config: Config, target: ModelRunner) -> RejectionSampler | None:
    """Returns a sampler with a copy of the draft, loaded as its worker does. Returns None without speculation."""
    if config.speculation.num_speculative_tokens == 0:
        return None
    draft = load_draft_model(config)
    draft_size, target_size = draft.model.config.vocab_size, target.model.config.vocab_size
    if draft_size != target_size:
        raise ConfigurationError(
            f"speculation.acceptance rejection needs equal vocabularies: the draft's has {draft_size} tokens, the "
            f"target's {target_size}"
        )
    max_model_len = draft.model.config.resolve_max_model_len(config.draft.max_model_len)
    return RejectionSampler(draft, StepLimits.of(config.draft, max_model_len))


def _vllm(config: Config, fingerprint: str, progress: Progress | None) -> Target:
    on_v2 = wants_v2_runner(config)
    set_environment(config.target, v2_runner=on_v2)  # vLLM reads some of it when it is imported
    check(V2_TARGET if on_v2 else TARGET, allow_untested=config.target.allow_untested_vllm)
    from cluster.vllm.target.target import VllmTarget  # only this engine needs vLLM

    return VllmTarget(config, fingerprint, on_v2=on_v2)


def _simulated(config: Config, fingerprint: str, progress: Progress | None) -> Target:
    """Returns a simulated target with the KV blocks that the model would have in bfloat16. Reads no weights."""
    target = config.target
    model = ModelConfig.from_folder(resolve_model_folder(target.model))
    pool: LinkPool
    if config.drafts_in_process:
        pool = _in_process_pool(config, make_drafter(config))
    else:
        pool = DraftPool.of(config, fingerprint)
    longest, token_bytes = target.max_model_len or model.max_position_embeddings, block_bytes(model, 1, torch.bfloat16)
    num_bytes = target.kv_cache_bytes or host_cache_bytes(target, longest, token_bytes)
    num_blocks = num_bytes // (target.block_size * token_bytes)
    return SimulatedTarget(
        config.simulation,
        config.simulation.vocab_size or model.vocab_size,
        StepLimits.of(target, usable_length(target, longest, num_blocks, token_bytes)),
        BlockManager(num_blocks, target.block_size, enable_prefix_caching=target.enable_prefix_caching),
        pool,
        config.speculation,
    )


_ENGINES: dict[EngineName, Callable[[Config, str, Progress | None], Target]] = {
    "torch": _torch,
    "vllm": _vllm,
    "simulated": _simulated,
}
