"""Traits of a target: everything except the request that its answers depend on.

Two targets with equal traits give equal answers to a request. A router compares all traits by name and value without
a list of known traits, so a new trait needs a change only in this module.
"""

from __future__ import annotations

import json
import platform
import uuid
from importlib import import_module
from pathlib import Path

import torch

from cluster.config import Config
from cluster.engine.arithmetic import is_portable
from cluster.engine.cpu_kernels import instruction_set
from cluster.engine.cpu_model import CpuModel
from cluster.engine.fingerprint import architecture_fingerprint, weights_fingerprint
from cluster.engine.loader import form_on, resolve_device
from cluster.engine.model_config import ModelConfig
from cluster.model_folder import resolve_model_folder
from cluster.speculation.noise import NOISE_VERSION
from cluster.targets.base import TargetModel
from cluster.vllm.target.lora import LoraLimits

ENGINE_VERSION = 5
"""Counted up with every change after which the same model gives other logits, be it in the last bit, or a filter or
grammar allows other tokens."""

_OF_THE_DRAFT = ("rejection", "engine")  # kinds of acceptance with which the draft influences the answer

# CPU flags by which the libraries and our kernels choose their code. Other flags do not change the results.
_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "avx512_vnni",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "sve",
    "bf16",
)


def traits_of(config: Config, model: TargetModel) -> dict[str, str]:
    """Returns the traits of the target that `config` describes and that runs `model`. Raises ConfigurationError."""
    noise = str(NOISE_VERSION)
    if config.target.engine == "simulated":  # a token is a hash of noise key, position and vocabulary size
        return {"engine": "simulated", "vocab_size": str(model.vocab_size), "noise": noise}
    folder = resolve_model_folder(config.target.model)
    device = resolve_device(config.target.device)
    dtype: torch.dtype = getattr(torch, model.dtype)
    return {
        "weights": weights_fingerprint(folder),
        "architecture": architecture_fingerprint(folder),
        "eos_token_ids": " ".join(map(str, model.eos_token_ids)),
        "dtype": model.dtype,
        "quantization": _quantization(config),
        **_engine_of(config, dtype, device),
        "numerics": config.target.numerics,
        "noise": noise,
        # Coupled and greedy acceptance only change the drafts, not the answer.
        "acceptance": acceptance if (acceptance := config.speculation.acceptance) in _OF_THE_DRAFT else "exact",
    }


def _engine_of(config: Config, dtype: torch.dtype, device: torch.device) -> dict[str, str]:
    target = config.target
    if target.engine == "vllm":
        return {
            "engine": f"vllm {import_module('vllm').__version__}, torch {torch.__version__}, {ENGINE_VERSION}",
            "processor": _processor(device),
            "tensor_parallel_size": str(target.tensor_parallel_size),
            "engine_args": json.dumps(target.engine_args, sort_keys=True),
            # With adapters enabled, vLLM runs other kernels, even for the base model. The adapters are reported
            # elsewhere.
            **({"max_lora_rank": str(LoraLimits.of(target).max_rank)} if target.takes_adapters else {}),
        }
    form = form_on(ModelConfig.from_folder(resolve_model_folder(target.model)), dtype, device, target.numerics)
    kernels = f"CpuModel, {instruction_set(dtype).name.lower()}" if form is CpuModel else form.__name__
    if form is CpuModel and not is_portable():
        kernels += f", other bits than elsewhere ({uuid.uuid4()})"  # unique, so that no target equals it
    elif kernels == "CpuModel, portable" and config.speculation.acceptance not in _OF_THE_DRAFT:
        # A token depends on these kernels and on operators that round each number once.
        return {"engine": str(ENGINE_VERSION), "tensor_parallel_size": "1", "kernels": kernels, "processor": "any"}
    return {
        "engine": f"torch {torch.__version__}, {ENGINE_VERSION}",
        "tensor_parallel_size": "1",
        "kernels": kernels,  # the instruction set changes how products round
        "processor": _processor(device),
    }


def _quantization(config: Config) -> str:
    name = config.target.quantization
    return f"int4 in groups of {config.target.quantization_group_size}" if name == "int4" else name or "none"


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} ({major}.{minor})"
    flags = _cpu_flags(Path("/proc/cpuinfo"))
    return " ".join([platform.machine(), *(flag for flag in _FLAGS if flag in flags)])


def _cpu_flags(cpuinfo: Path) -> set[str]:
    """Returns the flags of the first processor; empty if the system does not report them."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    named = (line.partition(":") for line in lines)
    return next((set(values.split()) for name, _, values in named if name.strip() in ("flags", "Features")), set())
