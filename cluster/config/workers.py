"""The sections `target` and `draft` of the configuration: one pool of workers each."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from cluster.config.types import AdapterName, Address, DrainSeconds, FilePath, HostPort, Port, Section, is_host_port
from cluster.errors import ConfigurationError

Dtype = Literal["auto", "float32", "bfloat16"]
QuantizationName = Literal["int8", "int4"]
EngineName = Literal["torch", "vllm", "simulated"]
DrafterName = Literal[
    "model", "ngram", "self-int4", "parallel", "eagle", "medusa", "mtp", "vllm", "engine", "simulated"
]
Numerics = Literal["fast", "invariant"]

READ_STATES: tuple[DrafterName, ...] = ("eagle", "medusa", "mtp")
"Drafters that read the target's hidden states, so they draft in the target's process."


class WorkerConfig(Section):
    """One pool of workers, all with the same model and engine settings."""

    model: str = Field(description="Hugging Face folder, hub name, or the name of a bundled model")
    dtype: Dtype = Field(
        "auto",
        description="type of weights and activations; auto: bfloat16, but float32 on a CPU without compiled kernels",
    )
    quantization: QuantizationName | None = Field(
        None, description="store the layers' projections as integers, converted from the checkpoint at start"
    )
    quantization_group_size: PositiveInt = Field(32, description="weights that share a scale in int4: 32 or 128")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: a GPU if PyTorch finds one, otherwise the CPU"
    )
    threads: PositiveInt | None = Field(None, description="compute threads; null: one per core that the worker may use")
    cpus: tuple[int, ...] | None = Field(
        None, description="cores to pin the worker to; null: the launcher divides a small machine's cores"
    )
    block_size: PositiveInt = Field(16, description="tokens per KV block")
    kv_cache_bytes: PositiveInt | None = Field(
        None,
        description="bytes of the KV cache; null: what memory_utilization leaves for it on a GPU; on a CPU room for "
        "one sequence of max_model_len and for max_num_seqs of 1,024 tokens, within memory_utilization",
    )
    memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        0.9,
        description="share of a GPU's memory that weights and KV cache may take, if kv_cache_bytes is null; on a CPU "
        "the KV cache takes at most half of this share of the available memory",
    )
    enable_prefix_caching: bool = Field(
        True, description="keep full blocks of committed tokens and reuse them for sequences with the same prefix"
    )
    max_model_len: PositiveInt | None = Field(
        None, description="maximum tokens of a sequence, prompt and answer; null: the model's limit"
    )
    max_num_seqs: PositiveInt = Field(64, description="maximum number of running sequences")
    max_num_batched_tokens: PositiveInt = Field(512, description="maximum tokens of a step")
    max_prefill_ms: PositiveFloat | None = Field(
        50.0,
        description="milliseconds that prompts may add to a step: a long prompt is computed in several steps, "
        "between which other sequences get tokens and start (a lone prompt may take four times as long; null: no "
        "limit but the tokens of a step)",
    )
    tensor_parallel_size: PositiveInt = Field(
        1, description="number of GPUs that share the model; above 1 with vLLM only"
    )
    engine_args: dict[str, Any] = Field(
        {}, description="further arguments of vLLM's engine, by their names there, such as `{enforce_eager: true}`"
    )
    allow_untested_vllm: bool = Field(
        False,
        description="run even if an untested version of vLLM differs in internals that Outrider uses; "
        "`--allow-untested-vllm` sets this for both kinds of workers",
    )
    drain_seconds: DrainSeconds = Field(
        30.0,
        description="seconds for which running requests may continue after SIGTERM; then the router moves "
        "them to another target",
    )
    addresses: tuple[Address, ...] = Field(
        (),
        description="addresses of the pool's workers, for their callers: `host:port`; `dns:name:port`, all "
        "addresses of a name; `file:path`, those in a file, one `host:port` per line. Changes of names and files "
        "are followed. `outrider serve` sets its own",
    )
    listen: HostPort | None = Field(
        None, description="address on which a worker listens; null: the first of `addresses`, if it is a `host:port`"
    )
    advertise: HostPort | None = Field(
        None,
        description="address at which others reach the worker, shown at `/health`; null: the one it listens on, "
        "with the host's name in place of 0.0.0.0",
    )
    metrics_host: str = Field(
        "127.0.0.1", description="address on which the metrics page listens; 0.0.0.0: reachable from other machines"
    )
    metrics_port: Port | None = Field(
        0,
        description="port of the metrics page; 0: a free one, which is logged; null: no page. `outrider serve` "
        "gives it to the pool's first worker, and free ones to the others",
    )
    metrics_token_file: FilePath | None = Field(
        None,
        description="token for the metrics page, for scrapers; each line of the file is one. null: that of "
        "`tls.token_file`, if set",
    )
    tls_server_name: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="name in the workers' certificates, if callers dial addresses that are not in them, such as "
        "those of pods; null: the dialled host",
    )
    health_listen: HostPort | None = Field(
        None,
        description="address of a plaintext gRPC health service without a token, for Kubernetes' probes, which "
        "support neither TLS nor tokens; null: only on the worker's own port",
    )

    @property
    def max_prefill_seconds(self) -> float | None:
        return None if self.max_prefill_ms is None else self.max_prefill_ms / 1e3

    @property
    def listen_address(self) -> str:
        """Address on which a worker listens. Raises ConfigurationError if no setting defines it."""
        if self.listen is not None:
            return self.listen
        if not self.addresses:
            raise ConfigurationError("no address to listen on: set `target.listen` or `draft.listen` to host:port")
        if not is_host_port(self.addresses[0]):
            raise ConfigurationError(
                f"{self.addresses[0]!r} is a list of workers, not an address to listen on: set `target.listen` or "
                "`draft.listen` to host:port"
            )
        return self.addresses[0]


class TargetConfig(WorkerConfig):
    model: str = Field(
        "outrider-target-12m",
        description="Hugging Face folder, hub name, or the name of a bundled model; the router and the "
        "draft workers also read its tokenizer",
    )
    replicas: PositiveInt = Field(1, description="number of target workers that the launcher starts")
    first_token_ms: PositiveFloat | None = Field(
        None,
        description="limit of the milliseconds from a request's arrival at a target to its first token, at p99; "
        "null: no limit",
    )
    refuse_late: bool = Field(
        False,
        description="whether a request that is predicted to miss its limits (`first_token_ms`, "
        "`speculation.output_token_ms`) is refused, so that routers try another target; a continued request is always "
        "accepted, and so is a lone one",
    )
    max_waiting_tokens: PositiveInt = Field(
        2**22,
        description="waiting prompt tokens, each sequence counted as at least 256, at which routers try another "
        "target; a continued request is always accepted, and so is a lone one",
    )
    engine: EngineName = Field(
        "torch",
        description="torch: runs the model; vllm: runs it with vLLM (`docs/VLLM.md`); simulated: computes nothing, "
        "see `simulation`, and reads only tokenizer and limits from `model`",
    )
    numerics: Numerics = Field(
        "fast",
        description="fast: logits may differ in their last bits with the batch; invariant: the same bits for any "
        "batch and any division of the work, or the worker does not start; with engine torch, a CPU needs "
        "the compiled kernels for it, and a GPU needs Triton and, in int4, a quantization_group_size that is a "
        "multiple of 32",
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="auto: the model's generation_config.json sets the temperature, top_p, top_k, min_p and "
        "repetition_penalty of requests without them, as in vLLM; none: OpenAI's defaults",
    )
    lora: dict[AdapterName, FilePath] = Field(
        {},
        description="LoRA adapters, by the name that requests give as their `model`: folders with PEFT's "
        "adapter_config.json and adapter_model.safetensors; engine vllm only (`docs/VLLM.md`)",
    )
    lora_root: FilePath | None = Field(
        None,
        description="folder that must contain all adapters loaded at run time (`outrider adapter load`); null: none "
        "can be loaded",
    )

    @property
    def first_token_limit(self) -> float:
        """`first_token_ms` in seconds; infinite without a limit."""
        return math.inf if self.first_token_ms is None else self.first_token_ms / 1e3

    @property
    def takes_adapters(self) -> bool:
        return bool(self.lora) or self.lora_root is not None


class DraftConfig(WorkerConfig):
    model: str = Field(
        "outrider-draft-2m",
        description="Hugging Face folder, hub name, or the name of a bundled model: a draft (best with the target's "
        "tokenizer), an EAGLE head, or Medusa heads (`docs/MODELS.md`); read only if drafter is model, parallel, "
        "eagle, medusa or vllm",
    )
    replicas: Annotated[int, Field(ge=0)] = Field(
        1, description="number of draft workers that the launcher starts; 0: no speculation"
    )
    placement: Literal["auto", "pool", "sidecar", "host-cpu", "in-process"] = Field(
        "auto",
        description="pool: every target uses every draft worker; sidecar: `replicas` draft workers with each target, "
        "on its host and for it alone; host-cpu: a sidecar with `device` cpu, on cores of the host that its target "
        "does not use; in-process: a drafter in each target's process, and no draft workers (with vLLM on its V2 "
        "runner: on the target's GPU); auto: pool, but in-process where `outrider serve` finds one target and its "
        "draft on one GPU or on a few cores, and host-cpu where the target has a GPU, `draft.device` is cpu and enough "
        "cores are free",
    )
    in_process_threads: Literal["auto", "shared", "own", "device"] = Field(
        "auto",
        description="with placement in-process: shared, it drafts in the target's thread while that waits for it, "
        "with `threads` threads (null: 1, or the target's for a draft that reads 8 MB per step); own, in a "
        "thread of its own, with `threads` or 1, and may run ahead; device: the target's steps on a GPU also draft, "
        "and are launched before the host reads the previous one (engine torch, drafter model on the same GPU, coupled "
        "acceptance, no trees; not run on a GPU yet); auto: own if draft and target have different devices, otherwise "
        "shared",
    )
    drafter: DrafterName = Field(
        "model",
        description="model: `draft.model`; parallel: the same, but one step makes all tokens of a proposal, with a "
        "model trained for it (PARD; `outrider distill --drafter parallel`); ngram: repetitions in the text so far; "
        "self-int4: the target's model in 4 bits; eagle: `draft.model` is an EAGLE or EAGLE-3 head, which drafts from "
        "the hidden states of the target in the target's process; medusa: the same with Medusa heads, which make all "
        "tokens of a proposal in one step; mtp: the same with the multi-token prediction module in the target's own "
        "checkpoint (MiMo-7B); vllm: `draft.model`, run by vLLM; engine: no draft worker, the target's engine drafts "
        "by itself, see `speculative_config`; simulated: for a simulated target",
    )
    load_root: FilePath | None = Field(
        None,
        description="folder on a draft worker's disk that must contain all drafts loaded at run time (`outrider drafts "
        "load`); null: none can be loaded",
    )
    context_tokens: PositiveInt | Literal["auto"] | None = Field(
        "auto",
        description="tokens at the end of a prompt that the draft model reads, after the first four; null: all tokens; "
        "auto: each draft worker finds the number by the prompt's length. A long prompt then takes the draft's time "
        "and KV cache of a short one, and no token of an answer changes (`docs/MODELS.md`). For drafter model, "
        "parallel and self-int4; with others, acceptance rejection and in_process_threads device, auto means all",
    )
    speculative_config: dict[str, Any] = Field(
        {},
        description="with drafter engine: vLLM's own `speculative_config`, such as `{method: ngram, "
        "prompt_lookup_max: 4}`; if it names no model, `draft.model` is used",
    )

    @model_validator(mode="before")
    @classmethod
    def _host_cpu_is_a_device(cls, values: Any) -> Any:
        """Sets `device` to cpu for placement host-cpu, so that every reader of `device` sees it."""
        if isinstance(values, dict) and values.get("placement") == "host-cpu":
            device = values.get("device", "auto")
            return values | {"device": "cpu" if device == "auto" else device}
        return values

    @model_validator(mode="before")
    @classmethod
    def _heads_draft_in_process(cls, values: Any) -> Any:
        """Sets `placement` to in-process for drafters of hidden states, as these do not leave the target's process."""
        if isinstance(values, dict) and values.get("drafter") in READ_STATES:
            placement = values.get("placement", "auto")
            return values | {"placement": "in-process" if placement == "auto" else placement}
        return values

    @property
    def reads_states(self) -> bool:
        """True if the drafter reads the target's hidden states."""
        return self.drafter in READ_STATES


def model_name(model: str) -> str:
    """Returns `model`, or the name of the folder if `model` is a path."""
    path = Path(model).expanduser()
    if model.startswith((".", "/", "~")) or path.is_dir():
        return path.resolve().name
    return model
