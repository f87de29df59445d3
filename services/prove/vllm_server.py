"""`vllm serve` with its defaults, without any code of this project: the system to compare with."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from typing import Any

from services.launch.child import Child

_ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def is_vllm_installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


def vllm_server(
    name: str,
    options: Mapping[str, Any],
    *,
    cpus: Sequence[int] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Child:
    """Returns a vLLM server with these `options` (names without leading dashes), which listens on 127.0.0.1.

    `cpus`: cores that it computes on if it has no GPU; the libraries that vLLM recommends for this are then preloaded.
    vLLM chooses the runner itself, even if the environment chooses one for Outrider's targets.
    """
    arguments = ["--host", "127.0.0.1"]
    for option, value in options.items():
        if isinstance(value, bool):
            arguments.append(f"--{option}" if value else f"--no-{option}")
        else:
            arguments += [f"--{option}", json.dumps(value) if isinstance(value, Mapping) else str(value)]
    own = {**_ENVIRONMENT, **(environment or {})}
    if importlib.util.find_spec("flashinfer") is None:
        own["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # otherwise vLLM does not start on a GPU
    if cpus is not None:
        from cluster.vllm.engine_args import recommended_libraries  # it imports torch

        own["LD_PRELOAD"] = ":".join(recommended_libraries())
        own["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cpus))
    # `env` sets the variables, so that only the server preloads the libraries, not this process or its other children.
    prefix = ["env", "-u", "VLLM_USE_V2_MODEL_RUNNER", *(f"{key}={value}" for key, value in own.items())]
    return Child(name, arguments, module="vllm.entrypoints.openai.api_server", prefix=prefix)
