"""Makes room in memory for all sequences, and checks if all systems fit at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from cluster.config import Config
from cluster.config.workers import WorkerConfig
from cluster.engine.host_memory import available_bytes, host_cache_bytes
from cluster.engine.memory_plan import GB
from cluster.engine.model_config import ModelConfig
from cluster.errors import ConfigurationError
from cluster.model_folder import resolve_model_folder
from services.launch.memory import planned_model
from services.prove.devices import Device
from services.prove.systems import Experiment

_SPARE_TOKENS = 64  # per sequence: uncommitted drafts and partly filled blocks
_WORKER_BYTES = 3 * GB  # besides weights and KV cache: activations, a GPU's context and graphs, vLLM's processes
_SMALL_WORKER_BYTES = 1 * GB  # the same for the PyTorch engine on a CPU
_USABLE_SHARE = 0.9  # share of the free memory


def with_room(config: Config, streams: Sequence[int], num_tokens: int) -> Config:
    """Returns `config` with room for a sequence of `num_tokens` per stream, in both pools.

    `vllm serve` gets the same limits. A KV cache that is sized by `memory_utilization` keeps its setting.
    """
    num_seqs, max_sequence_tokens = max(streams), num_tokens + _SPARE_TOKENS

    def roomy(worker: Any, model: str, max_model_len: int | None) -> Any:
        update: dict[str, object] = {"max_num_seqs": max(num_seqs, worker.max_num_seqs)}
        planned = planned_model(model, worker)
        if worker.kv_cache_bytes is not None and planned is not None:
            needed = math.ceil(1.25 * num_seqs * max_sequence_tokens * planned.kv_bytes_per_token)
            update["kv_cache_bytes"] = max(needed, worker.kv_cache_bytes)
        return worker.model_copy(update=update | {"max_model_len": max_model_len})

    target, draft = config.target, config.draft
    return config.model_copy(
        update={
            "target": roomy(target, target.model, target.max_model_len or _clamped(max_sequence_tokens, target.model)),
            "draft": roomy(draft, config.draft_model, draft.max_model_len),
        }
    )


def fit_together(experiment: Experiment) -> bool:
    """Returns whether all systems fit into the free memory at once; False if unknown."""
    config, target, draft = experiment.config, experiment.target, experiment.draft
    of_target = _num_bytes(config.target, config.target.model, target, is_vllm=config.target.engine == "vllm")
    of_peer = _num_bytes(config.target, config.target.model, target, is_vllm=True)
    is_vllm = config.draft.drafter == "vllm"
    beside, remote = (
        _num_bytes(config.draft, config.draft_model, device, is_vllm=is_vllm) for device in (target, draft)
    )
    if of_target is None or of_peer is None or beside is None or remote is None:
        return False
    needed = {target: 3 * of_target + experiment.has_peer * of_peer + beside}
    needed[draft] = needed.get(draft, 0.0) + remote
    on_host = sum(size for device, size in needed.items() if device.kind == "cpu")
    on_gpus = {device: size for device, size in needed.items() if device.kind == "cuda"}
    return on_host <= _USABLE_SHARE * available_bytes() and all(
        size <= _USABLE_SHARE * _gpu_bytes(device) for device, size in on_gpus.items()
    )


def sharing_memory(config: Config, device: Device) -> Config:
    """Returns `config` with the `memory_utilization` that the target needs on a shared GPU.

    vLLM refuses to start unless this share of the GPU's memory is free, even if the size of the KV cache is set. On a
    CPU, or if the need is unknown, `config` is unchanged.
    """
    needed = _num_bytes(config.target, config.target.model, device, is_vllm=True)
    if device.kind == "cpu" or needed is None:
        return config
    share = min(config.target.memory_utilization, needed / _gpu_bytes(device, total=True))
    return config.model_copy(update={"target": config.target.model_copy(update={"memory_utilization": share})})


def _clamped(num_tokens: int, model: str) -> int:
    """Limits `num_tokens` to the context of the model, if that is known."""
    try:
        return min(num_tokens, ModelConfig.from_folder(resolve_model_folder(model)).max_position_embeddings)
    except ConfigurationError:
        return num_tokens


def _num_bytes(worker: WorkerConfig, model: str, device: Device, *, is_vllm: bool) -> float | None:
    """Estimates the memory of a worker on `device` in bytes; None if it is unknown.

    It is also unknown if the KV cache has a share of a GPU's memory.
    """
    planned = planned_model(model, worker)
    num_bytes = worker.kv_cache_bytes
    if planned is not None and num_bytes is None and device.kind == "cpu":
        longest = worker.max_model_len or ModelConfig.from_folder(resolve_model_folder(model)).max_position_embeddings
        num_bytes = host_cache_bytes(worker, longest, planned.kv_bytes_per_token)
    if planned is None or num_bytes is None:
        return None
    own = _WORKER_BYTES if is_vllm or device.kind == "cuda" else _SMALL_WORKER_BYTES
    return planned.weight_bytes + num_bytes + own


def _gpu_bytes(device: Device, *, total: bool = False) -> float:
    import torch

    return float(torch.cuda.mem_get_info(device.index)[int(total)])
