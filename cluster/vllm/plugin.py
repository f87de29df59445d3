"""The entry point `vllm.general_plugins`: vLLM calls `register` in every process that it starts.

It is called wherever this package is installed beside vLLM, in our own target worker too, and so only puts two doors
in, each of which opens when `--additional-config '{"outrider": {"draft_addresses": [...]}}'` is set:

    EngineArgs.create_engine_config    the front end: how requests are sampled, and which speculation vLLM prepares for
    init_speculator                    the model runner: who proposes the drafts
"""

from __future__ import annotations

import functools
import multiprocessing
import sys
from collections.abc import Callable
from typing import Any

_DOOR = "_outrider_door"


def register() -> None:
    """May be called again and again."""
    # Before `vllm.v1.worker.gpu.model_runner` is imported, which takes the function by its name.
    import vllm.v1.worker.gpu.spec_decode as spec_decode

    _put_in(spec_decode, "init_speculator", _init_speculator)
    # Workers configure nothing: there the import would cost a second for nothing.
    if "vllm.engine.arg_utils" in sys.modules or multiprocessing.parent_process() is None:
        from vllm.engine.arg_utils import EngineArgs

        _put_in(EngineArgs, "create_engine_config", _create_engine_config)


def is_asked_for(additional_config: object) -> bool:
    """Whether this plugin is to do anything; our own target worker has a section of the same name."""
    section = additional_config.get("outrider") if isinstance(additional_config, dict) else None
    return isinstance(section, dict) and "draft_addresses" in section


def _put_in(owner: Any, name: str, door: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    if hasattr(original, _DOOR):
        return

    @functools.wraps(original)
    def opened(*arguments: Any, **options: Any) -> Any:
        return door(original, *arguments, **options)

    setattr(opened, _DOOR, True)
    setattr(owner, name, opened)


def _create_engine_config(original: Callable[..., Any], engine_args: Any, *arguments: Any, **options: Any) -> Any:
    if not is_asked_for(engine_args.additional_config):
        return original(engine_args, *arguments, **options)
    from cluster.vllm.v2.front_end import prepare

    prepare(engine_args)
    config = original(engine_args, *arguments, **options)
    from cluster.vllm.v2.front_end import check

    check(config)
    return config


def _init_speculator(original: Callable[..., Any], vllm_config: Any, device: Any, req_states: Any) -> Any:
    if not is_asked_for(vllm_config.additional_config):
        return original(vllm_config, device, req_states)
    from cluster.vllm.v2.speculator import make_speculator

    return make_speculator(vllm_config, device, req_states)
