"""The entry point `vllm.general_plugins`: vLLM calls `register` in every process that it starts.

This includes processes that do not use Outrider, so `register` only wraps two functions. The wrappers do nothing
except in our target worker, or with `--additional-config '{"outrider": {"draft_addresses": [...]}}'`:

    EngineArgs.create_engine_config    Front end: the sampling of requests, and the scheduler with the links.
    init_speculator                    Model runner: drafts come with the steps, or are drawn under the shared noise.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from typing import Any

from cluster.vllm.function_wrapping import wrap_function
from cluster.vllm_plugin import is_asked_for


def register() -> None:
    """Wraps vLLM's functions. Calling it repeatedly is safe."""
    # Wrap before `vllm.v1.worker.gpu.model_runner` is imported, because that module imports the function by its name.
    import vllm.v1.worker.gpu.spec_decode as spec_decode

    wrap_function(spec_decode, "init_speculator", _init_speculator)
    # Worker processes do not create configurations, and the import would cost them a second.
    if "vllm.engine.arg_utils" in sys.modules or multiprocessing.parent_process() is None:
        from vllm.engine.arg_utils import EngineArgs

        wrap_function(EngineArgs, "create_engine_config", _create_engine_config)


def _create_engine_config(original: Callable[..., Any], engine_args: Any, *arguments: Any, **options: Any) -> Any:
    if not is_asked_for(engine_args.additional_config):
        return original(engine_args, *arguments, **options)
    from cluster.vllm_plugin.front_end import check, prepare

    prepare(engine_args)
    config = original(engine_args, *arguments, **options)
    check(config)
    return config


def _init_speculator(original: Callable[..., Any], vllm_config: Any, device: Any, req_states: Any) -> Any:
    if not getattr(vllm_config.scheduler_config.get_scheduler_cls(), "couples_drafts", False):
        return original(vllm_config, device, req_states)  # the scheduler is not ours
    speculation = vllm_config.speculative_config
    if speculation.use_ngram():  # configured by `carrier`: drafts arrive with the steps
        from cluster.vllm.runner.bound_steps import NoSpeculator

        return NoSpeculator(req_states.max_num_reqs, req_states.num_speculative_steps, device)
    from cluster.vllm.runner.coupled_drafts import RecordedSpeculator, couple

    if speculation.uses_draft_model():
        speculator = RecordedSpeculator(vllm_config, device)
    else:
        speculator = original(vllm_config, device, req_states)
    couple(speculator, req_states)
    return speculator
