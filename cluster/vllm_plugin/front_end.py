"""Extension of vLLM's front end: makes every request greedy for vLLM, and moves its sampling parameters to a coupling.

temperature, top_k, top_p, min_p, seed    Go to the coupling in `extra_args`; vLLM gets neutral values.
logit_bias, penalties, bad words, ...     Go to vLLM, which applies them.
vllm_xargs {"num_speculative_tokens": n}  Goes to the coupling.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams as VllmSamplingParams
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest

from cluster.errors import ConfigurationError
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.vllm import compatibility
from cluster.vllm.coupling import Coupling
from cluster.vllm.engine_args import COUPLED_SAMPLING, allow_bias, carrier, check_verifies
from cluster.vllm.function_wrapping import wrap_function
from cluster.vllm_plugin import is_asked_for
from cluster.vllm_plugin.settings import PluginSettings

_K = "num_speculative_tokens"
_SCHEDULER = "cluster.vllm_plugin.scheduler.PluginScheduler"
_INT64 = range(-(2**63), 2**63)


def prepare(engine_args: Any) -> None:
    """Adapts `engine_args` before vLLM creates its configuration from them.

    Raises ConfigurationError if vLLM's version or an argument does not fit the plugin.
    """
    settings = PluginSettings.of(engine_args.additional_config)
    compatibility.check(compatibility.V2_FRONT_END, allow_untested=settings.allow_untested_vllm)
    max_drafts = settings.max_drafts
    ours: dict[str, Any] = {"speculative_config": carrier(max_drafts)}
    if max_drafts:
        # With the runner in its own process, the scheduler continues while a launch waits for the device.
        ours |= {"scheduler_cls": _SCHEDULER, "async_scheduling": True, "distributed_executor_backend": "mp"}
    for name, value in ours.items():
        given = getattr(engine_args, name)
        if given not in (None, value):
            raise ConfigurationError(
                f"--{name.replace('_', '-')} {given} cannot be combined with the section outrider of "
                "`--additional-config`: leave one of them out"
            )
        setattr(engine_args, name, value)
    processors = list(engine_args.logits_processors or ())
    if COUPLED_SAMPLING not in processors:
        engine_args.logits_processors = [*processors, COUPLED_SAMPLING]
    allow_bias()
    wrap_function(InputProcessor, "process_inputs", _process_inputs)
    wrap_function(ParentRequest, "get_child_info", _get_child_info)


def check(config: Any) -> None:
    """Checks vLLM's final configuration. Raises ConfigurationError if the plugin does not work with it."""
    if not config.use_v2_model_runner:
        raise ConfigurationError(
            "the outrider plugin needs vLLM's V2 model runner, which this configuration does not select: set "
            "VLLM_USE_V2_MODEL_RUNNER=1, or leave outrider out of --additional-config"
        )
    settings = PluginSettings.of(config.additional_config)
    compatibility.check(compatibility.V2_STEPS, allow_untested=settings.allow_untested_vllm)
    mode = config.model_config.logprobs_mode
    if mode.startswith("processed"):
        raise ConfigurationError(
            f"--logprobs-mode {mode} would include the noise of coupled sampling: choose a raw one"
        )
    if config.watermark_config is not None:
        raise ConfigurationError("watermarking draws tokens by its own rule: leave it or outrider.draft_addresses out")
    if config.num_speculative_tokens:
        _check_drafts(config)


def _check_drafts(config: Any) -> None:
    """Raises ConfigurationError for settings with which drafts have not been seen to keep all tokens the same."""
    model, parallel, transfer = config.model_config, config.parallel_config, config.kv_transfer_config
    check_verifies(model, torch.device(config.device_config.device_type))
    num_engines = parallel.data_parallel_size
    refused = {
        # All ranks read the drafts of the same step from shared memory.
        f"--nnodes {parallel.nnodes}": parallel.nnodes > 1,
        f"--pipeline-parallel-size {parallel.pipeline_parallel_size}": parallel.pipeline_parallel_size > 1,
        "--enable-lora": config.lora_config is not None,
        f"--kv-transfer-config with {transfer and transfer.kv_connector}": transfer is not None,
        f"--data-parallel-size {num_engines} for a model with experts": num_engines > 1 and model.is_moe,
        # The prompts of a step share its tokens, and no share might be large enough for a picture.
        "--disable-chunked-mm-input, which vLLM sets for models that read a picture in both directions": (
            config.scheduler_config.disable_chunked_mm_input and model.is_multimodal_model
        ),
    }
    for name, is_given in refused.items():
        if is_given:
            raise ConfigurationError(
                f"with draft workers the outrider plugin does not support {name}: leave it out, or set "
                "outrider.draft_addresses to []"
            )


# Requests.


def _process_inputs(
    original: Callable[..., Any], processor: Any, request_id: str, prompt: Any, params: Any, *rest: Any, **options: Any
) -> Any:
    """Couples the requests of engines that have the plugin enabled. Passes other requests on unchanged."""
    additional_config = processor.vllm_config.additional_config
    if not isinstance(params, VllmSamplingParams) or not is_asked_for(additional_config):
        return original(processor, request_id, prompt, params, *rest, **options)
    seed = secrets.randbits(64) - 2**63 if params.seed is None else params.seed
    speculation = PluginSettings.of(additional_config).speculation
    shape, k = couple(params, seed, speculation.max_speculative_tokens)
    request = original(processor, request_id, prompt, params, *rest, **options)
    coupling = Coupling(shape, NoiseKey.derive(seed, 0), len(request.prompt_token_ids or ()), k)
    make_greedy(request.sampling_params, coupling)
    request.sampling_params.seed = seed if params.n > 1 else None  # `_get_child_info` derives the choices' keys from it
    return request


def _get_child_info(original: Callable[..., Any], parent: Any, index: int) -> Any:
    request_id, params = original(parent, index)
    coupling = Coupling.of(params)
    if coupling is not None:
        key = NoiseKey.derive(parent.sampling_params.seed, index)
        params = copy(params)
        params.seed = None
        make_greedy(params, replace(coupling, noise_key=key))
    return request_id, params


def couple(params: Any, seed: int, max_speculative_tokens: int) -> tuple[SamplingParams, int | None]:
    """Returns the sampling parameters in vLLM's `params`, and the requested number of drafts (None: not set).

    Raises VLLMValidationError if the seed or the number of drafts is out of range.
    """
    if seed not in _INT64:
        raise VLLMValidationError(f"seed {seed} is not a signed 64-bit number", parameter="seed", value=seed)
    k = (params.extra_args or {}).get(_K)
    if k is not None and (type(k) is not int or not 0 <= k <= max_speculative_tokens):
        limit = f"it must be a whole number from 0 to {max_speculative_tokens}, which outrider.speculation sets"
        raise VLLMValidationError(f"{_K} {k!r}: {limit}", parameter=_K, value=k)
    shape = SamplingParams(
        temperature=params.temperature,
        top_k=max(0, params.top_k),
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=tuple((int(token), float(bias)) for token, bias in (params.logit_bias or {}).items()),
    )
    return shape, k


def make_greedy(params: Any, coupling: Coupling) -> None:
    """Makes `params` greedy for vLLM's engine, with `coupling` in `extra_args`.

    Replaces the dict `extra_args`, because other parameters may share it.
    """
    params.temperature, params.top_k, params.top_p, params.min_p = 0.0, 0, 1.0, 0.0
    params.extra_args = (params.extra_args or {}) | coupling.to_extra_args()
