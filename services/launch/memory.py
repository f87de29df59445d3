"""Divides the memory of a device among the workers that a launcher starts on it."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from cluster.config import Config
from cluster.config.workers import DraftConfig, TargetConfig, WorkerConfig
from cluster.engine.memory_plan import GB, Budget, Memory, PlannedModel, Tenant
from cluster.errors import ConfigurationError
from cluster.model_folder import resolve_model_folder
from services.launch.place_draft import draft_has_gpu, target_has_gpu

_QUERY = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
_QUERY_SECONDS = 10.0
_MIB = 2**20

_Pool = TargetConfig | DraftConfig


def share_memory(config: Config) -> Config:
    """Returns `config` with shares for the workers on one device that size their KV caches by its memory.

    On a CPU each gets an equal part of its `memory_utilization`. On the machine's only GPU all caches hold the same
    number of tokens; workers with models of unknown sizes keep their settings.
    """
    workers: list[tuple[str, _Pool, bool]] = [("target", config.target, target_has_gpu(config))]
    if config.has_draft_workers:
        workers.append(("draft", config.draft, draft_has_gpu(config)))
    on_host = sum(worker.replicas for _, worker, has_gpu in workers if not has_gpu)
    shares: dict[str, dict[str, object]] = {
        pool: {"memory_utilization": worker.memory_utilization / on_host}
        for pool, worker, has_gpu in workers
        if not has_gpu and on_host > 1
    }
    on_gpu = {pool: worker for pool, worker, has_gpu in workers if has_gpu}
    if sum(worker.replicas for worker in on_gpu.values()) > 1:
        shares |= _gpu_shares(config, on_gpu)
    return config.model_copy(
        update={pool: getattr(config, pool).model_copy(update=share) for pool, share in shares.items()}
    )


def _gpu_shares(config: Config, workers: Mapping[str, _Pool]) -> dict[str, dict[str, object]]:
    """Returns the settings of the pools whose workers share a GPU; none if a model or the GPU's size is unknown."""
    gigabytes = _gpu_gigabytes()
    planned = {
        pool: planned_model(config.draft_model if pool == "draft" else w.model, w) for pool, w in workers.items()
    }
    if gigabytes is None or any(worker.kv_cache_bytes is not None for worker in workers.values()):
        return {}
    tenants = [(pool, model) for pool, model in planned.items() for _ in range(workers[pool].replicas)]
    if any(model is None for _, model in tenants):
        return {}
    target = config.target
    memory = Memory(gigabytes, target.memory_utilization, target.block_size)
    budget = Budget(tuple(Tenant(pool, model, 0) for pool, model in tenants if model is not None), memory)
    if sum(budget.cache_shares()) == 0:
        raise ConfigurationError(
            f"the weights of {len(tenants)} workers ({budget.weight_bytes / GB:.1f} GB) leave no memory for KV caches "
            f"on a GPU of {gigabytes:.1f} GB: start fewer workers or smaller models, or set draft.device to cpu"
        )
    return {
        tenant.role: {
            "kv_cache_bytes": int(num_bytes),
            # vLLM refuses to start unless this share of the memory is free.
            "memory_utilization": min(1.0, (tenant.model.weight_bytes + num_bytes) / (gigabytes * GB)),
        }
        for tenant, num_bytes in zip(budget.tenants, budget.cache_shares(), strict=True)
    }


def planned_model(model: str, worker: WorkerConfig) -> PlannedModel | None:
    """Returns the sizes of the model; None if only vLLM supports it."""
    dtype = worker.quantization or ("fp32" if worker.dtype == "float32" else "bf16")
    try:
        return PlannedModel.parse(f"{resolve_model_folder(model)}:{dtype}").with_wide_head()
    except ConfigurationError:
        return None


def _gpu_gigabytes() -> float | None:
    """Returns the memory of the first GPU; None if its driver does not report it."""
    try:
        answer = subprocess.run(_QUERY, capture_output=True, text=True, check=True, timeout=_QUERY_SECONDS).stdout
        return float(answer.splitlines()[0]) * _MIB / GB
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
