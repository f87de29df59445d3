"""The configuration: one YAML tree for every program, read once, unknown keys refused.

It is read by `cluster.config_file`. What can be derived is a property.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from cluster.config_ray import PlacementConfig, RayConfig
from cluster.config_router import RouterConfig
from cluster.config_simulation import SimulationConfig
from cluster.config_tls import TlsConfig
from cluster.config_types import (
    AdapterName,
    Address,
    DrainSeconds,
    FilePath,
    HostPort,
    LogFormat,
    LogLevel,
    Port,
    Section,
    Share,
    is_host_port,
)
from cluster.errors import ConfigurationError

DEFAULT_KV_CACHE_BYTES = 256 * 2**20

Dtype = Literal["auto", "float32", "bfloat16"]
QuantizationName = Literal["int8", "int4"]
EngineName = Literal["torch", "vllm", "simulated"]
DrafterName = Literal["model", "ngram", "self-int4", "layer-skip", "vllm", "engine", "simulated"]
LayerChoice = Literal["even", "last-half"] | tuple[Annotated[int, Field(ge=0)], ...]
Numerics = Literal["fast", "invariant"]
GpuKernels = Literal["torch", "triton"]


class WorkerConfig(Section):
    """One pool of workers, all with the same model and engine settings."""

    model: str = Field(description="Hugging Face folder, hub name, or the name of a bundled model")
    dtype: Dtype = Field(
        "auto",
        description="type of weights and activations; auto: bfloat16, for a draft on a CPU without AVX-512 float32",
    )
    quantization: QuantizationName | None = Field(
        None, description="keep the layers' projections as integers, made from the checkpoint at start"
    )
    quantization_group_size: PositiveInt = Field(32, description="weights that share a scale in int4: 32 or 128")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: a GPU where PyTorch finds one, else the CPU"
    )
    gpu_kernels: GpuKernels = Field(
        "torch",
        description="on a GPU, what the PyTorch engine attends and samples with. torch: PyTorch's operators; triton: "
        "kernels of our own, which copy no contexts, and graphs of a few sizes that are recorded at start (not yet run "
        "on a GPU: `make gpu-check`)",
    )
    threads: PositiveInt | None = Field(
        None, description="compute threads; null: one for each core that the worker may use"
    )
    cpus: tuple[int, ...] | None = Field(
        None, description="cores to pin the worker to; null: the launcher divides a small machine's cores"
    )
    block_size: PositiveInt = Field(16, description="tokens in a KV block")
    kv_cache_bytes: PositiveInt | None = Field(
        DEFAULT_KV_CACHE_BYTES,
        description="memory of the KV cache; null: by memory_utilization on a GPU, the default on a CPU",
    )
    memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        0.9,
        description="where kv_cache_bytes is null, share of the GPU memory beside the weights that the KV cache gets",
    )
    enable_prefix_caching: bool = Field(
        True, description="keep full blocks of committed tokens and reuse them for sequences that begin alike"
    )
    max_model_len: PositiveInt | None = Field(
        None, description="tokens of the longest sequence, prompt and answer; null: the model's limit"
    )
    max_num_seqs: PositiveInt = Field(64, description="sequences that run at once")
    max_num_batched_tokens: PositiveInt = Field(512, description="tokens in one step at most")
    max_prefill_ms: PositiveFloat | None = Field(
        50.0,
        description="milliseconds that prompts may add to a step: a long one is computed in so many steps, between "
        "which others get their tokens, and begin (a prompt that is alone in the engine: four times as many; null: as "
        "many of their tokens as a step takes)",
    )
    tensor_parallel_size: PositiveInt = Field(1, description="GPUs that share the model; more than 1: with vLLM only")
    engine_args: dict[str, Any] = Field(
        {}, description="further arguments of vLLM's engine, by their names there, such as `{enforce_eager: true}`"
    )
    drain_seconds: DrainSeconds = Field(
        30.0, description="how long running requests may go on after SIGTERM; then the router takes them elsewhere"
    )
    addresses: tuple[Address, ...] = Field(
        (),
        description="where the pool's workers are, for those who call them: `host:port`; `dns:name:port`, all "
        "addresses of a name; `file:path`, those in a file, one `host:port` a line. Names and files are followed as "
        "they change. `outrider serve` chooses its own",
    )
    listen: HostPort | None = Field(
        None, description="where a worker listens; null: at the first of `addresses`, if that is a `host:port`"
    )
    advertise: HostPort | None = Field(
        None,
        description="where others reach the worker, shown at `/health`; null: where it listens, with the host's name "
        "in place of 0.0.0.0",
    )
    metrics_host: str = Field(
        "127.0.0.1", description="where the metrics page listens; 0.0.0.0: reachable from other machines"
    )
    metrics_port: Port | None = Field(
        0,
        description="port of the metrics page; 0: a free one, which the log says; null: no page. `outrider serve` "
        "gives it to the pool's first worker, and free ones to the others",
    )
    metrics_token_file: FilePath | None = Field(
        None,
        description="a token that opens the metrics page, for who scrapes it; each line of the file is one. null: that "
        "of `tls.token_file`, if there is one",
    )
    tls_server_name: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="what the workers' certificates have to be for, where callers dial addresses that are not in them, "
        "such as those of pods; null: the host that is dialled",
    )
    reflection: bool = Field(
        False, description="whether gRPC's reflection tells callers of the worker's methods, for tools such as grpcurl"
    )
    health_listen: HostPort | None = Field(
        None,
        description="where gRPC's health service is answered in plaintext and without a token, and nothing else, for "
        "Kubernetes' probes, which know neither; null: only with all the rest",
    )

    @property
    def max_prefill_seconds(self) -> float | None:
        return None if self.max_prefill_ms is None else self.max_prefill_ms / 1e3

    @property
    def listen_address(self) -> str:
        """Raises ConfigurationError when no setting says it."""
        if self.listen is not None:
            return self.listen
        if not self.addresses:
            raise ConfigurationError("no address to listen at: set `target.listen` or `draft.listen` to host:port")
        if not is_host_port(self.addresses[0]):
            raise ConfigurationError(
                f"{self.addresses[0]!r} says where workers are, not where this one listens: set `target.listen` or "
                "`draft.listen` to host:port"
            )
        return self.addresses[0]


class TargetConfig(WorkerConfig):
    model: str = Field(
        "outrider-target-12m",
        description="Hugging Face folder, hub name, or the name of a bundled model; the router reads its tokenizer too",
    )
    replicas: PositiveInt = Field(1, description="target workers that the launcher starts")
    max_waiting_tokens: PositiveInt = Field(
        2**22,
        description="tokens of sequences that wait for their first one, each counted as 256 at least, before routers "
        "are told to try another target; what was begun on another is taken whatever waits, and one alone always is",
    )
    engine: EngineName = Field(
        "torch",
        description="torch: runs the model; vllm: has vLLM run it (`docs/VLLM.md`); simulated: computes nothing, see "
        "`simulation`, and takes only tokenizer and limits from `model`",
    )
    numerics: Numerics = Field(
        "fast",
        description="fast: logits may differ in their last bits with the batch; invariant: the same bits whatever the "
        "batch and the cut of the work, or no start at all",
    )
    lora: dict[AdapterName, FilePath] = Field(
        {},
        description="LoRA adapters, by the name that requests give as their `model`: folders with PEFT's "
        "adapter_config.json and adapter_model.safetensors; engine vllm only (`docs/VLLM.md`)",
    )
    lora_root: FilePath | None = Field(
        None,
        description="folder below which adapters have to lie that are loaded while the target serves (`outrider "
        "adapter load`); null: none can be",
    )

    @property
    def takes_adapters(self) -> bool:
        return bool(self.lora) or self.lora_root is not None


class DraftConfig(WorkerConfig):
    model: str = Field(
        "outrider-draft-2m",
        description="Hugging Face folder, hub name, or the name of a bundled model, with the target's tokenizer; only "
        "read where drafter is model",
    )
    replicas: Annotated[int, Field(ge=0)] = Field(
        1, description="draft workers that the launcher starts; 0: no speculation"
    )
    placement: Literal["auto", "pool", "sidecar", "in-process"] = Field(
        "auto",
        description="pool: every target uses every draft worker; sidecar: `replicas` draft workers beside each target, "
        "on its host and for it alone; in-process: a drafter in each target's process, and no draft workers; auto: "
        "pool, but in-process where `outrider serve` finds one target and its draft on a few cores",
    )
    in_process_threads: Literal["auto", "shared", "own"] = Field(
        "auto",
        description="with placement in-process: shared, it drafts in the target's thread while that waits for it, "
        "with `threads` threads (null: 1, or the target's for a draft that reads 8 MB a step); own, in a thread of its "
        "own, with `threads` or 1, and may run ahead; auto: own where draft and target have different devices, else "
        "shared",
    )
    drafter: DrafterName = Field(
        "model",
        description="model: `draft.model`; ngram: repetitions in the text so far; self-int4, layer-skip: the target's "
        "model in 4 bits, or some of its layers; vllm: `draft.model`, run by vLLM; engine: no draft worker, the "
        "target's engine drafts by itself, see `speculative_config`; simulated: for a simulated target",
    )
    speculative_config: dict[str, Any] = Field(
        {},
        description="with drafter engine: vLLM's own `speculative_config`, such as `{method: ngram, "
        "prompt_lookup_max: 4}`; where it names no model, `draft.model` is meant",
    )
    layers: LayerChoice = Field("even", description="which layers layer-skip keeps: even, last-half or a list")
    ngram_min: PositiveInt = Field(1, description="tokens of the shortest run that ngram looks up")
    ngram_max: PositiveInt = Field(4, description="tokens of the longest run that ngram looks up")

    @model_validator(mode="after")
    def _runs_have_a_length(self) -> DraftConfig:
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min {self.ngram_min} exceeds ngram_max {self.ngram_max}")
        return self


class SpeculationConfig(Section):
    num_speculative_tokens: Annotated[int, Field(ge=0, le=64)] = Field(
        4,
        description="draft tokens a round (k): where the controller begins, or stays when it is fixed; 0: no draft "
        "worker is started and the target gets every core",
    )
    max_speculative_tokens: Annotated[int, Field(ge=0, le=64)] = Field(
        16, description="the most that a controller chooses and that a request may ask for"
    )
    controller: Literal["goodput", "threshold", "fixed"] = Field(
        "goodput",
        description="who chooses k: goodput, what pays by measured times and acceptance; threshold, a rule on the "
        "acceptance rate; fixed, num_speculative_tokens",
    )
    acceptance: Literal["coupled", "greedy", "rejection", "engine"] = Field(
        "coupled",
        description="coupled: the draft sees the target's noise. For comparison: greedy, it proposes its likeliest "
        "token, as engines do that have nothing but token IDs; rejection, the target runs a copy of the draft for its "
        "probabilities, and what comes out depends on the draft; engine, vLLM samples and accepts in its own way, with "
        "no promise about the outcome",
    )
    max_run_ahead: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="tokens past the committed ones that a drafter may go at most; within that it goes 2k+2 far; "
        "0: no further than k; null: the 2k+2 of max_speculative_tokens, or 0 where the launcher finds that draft and "
        "target share cores",
    )
    run_ahead_branches: Annotated[int, Field(ge=0, le=8)] | None = Field(
        None,
        description="second-best drafts that run-ahead follows beside the best; null: 2, or 0 where the launcher finds "
        "that draft and target share cores",
    )
    tree_width: Annotated[int, Field(ge=1, le=8)] = Field(
        1,
        description="children of a draft token at most: with more than 1 the drafts of a round are the tree that the "
        "measured acceptance makes best, which may be a chain; goodput chooses their number and the tree together",
    )
    tune_draft_temperature: bool = Field(
        True, description="search, while it works, for the draft temperature that is accepted most often"
    )
    draft_timeout_ms: Annotated[float, Field(gt=0)] = Field(
        50.0, description="how long a step waits for a proposal before it decodes plainly"
    )

    @model_validator(mode="after")
    def _default_within_limit(self) -> SpeculationConfig:
        if self.num_speculative_tokens > self.max_speculative_tokens:
            raise ValueError(
                f"num_speculative_tokens {self.num_speculative_tokens} exceeds max_speculative_tokens "
                f"{self.max_speculative_tokens}: raise the latter"
            )
        return self

    @model_validator(mode="after")
    def _rejection_of_chains(self) -> SpeculationConfig:
        if self.acceptance == "rejection" and self.tree_width > 1:
            raise ValueError(f"acceptance rejection verifies chains only: set tree_width 1, not {self.tree_width}")
        return self

    @property
    def tunes_draft_temperature(self) -> bool:
        """Not where the target must know the distribution that the draft sampled from."""
        return self.tune_draft_temperature and self.acceptance != "rejection"

    @property
    def num_run_ahead_branches(self) -> int:
        return 2 if self.run_ahead_branches is None else self.run_ahead_branches

    def window(self, num_speculative_tokens: int) -> int:
        """How far past the committed tokens a drafter may run for a sequence with this k."""
        return window_of(num_speculative_tokens, self.granted_window)

    @property
    def granted_window(self) -> int:
        """How far it may run at most, whatever k is; a proposal of k tokens is always allowed."""
        if self.max_run_ahead is not None:
            return self.max_run_ahead
        return 2 * self.max_speculative_tokens + 2


def window_of(num_speculative_tokens: int, granted: int) -> int:
    """2k+2, as far as it is granted, and k in any case: the next proposal and the bonus tokens of two rounds."""
    return max(num_speculative_tokens, min(granted, 2 * num_speculative_tokens + 2))


class TracingConfig(Section):
    """Spans of requests, exported by OTLP over HTTP."""

    endpoint: Annotated[str, Field(pattern=r"^https?://[^\s/]+\S*$")] | None = Field(
        None,
        description="the collector, such as `http://localhost:4318`; spans go to `/v1/traces` below it. null: no "
        "tracing. Needs the extra `outrider[tracing]`",
    )
    sample_ratio: Share = Field(
        1.0,
        description="share of the requests that are traced, of those that come without a `traceparent`; with one, it "
        "says whether",
    )


class LoggingConfig(Section):
    level: LogLevel = Field(
        "info", description="the least that is logged: debug, info, warning or error; `--log-level` is the same"
    )
    format: LogFormat = Field(
        "text", description="text: `time level program: message`; json: an object a line; `--log-format` is the same"
    )


class Config(Section):
    target: TargetConfig = Field(TargetConfig(), description="The workers that verify and decide.")
    draft: DraftConfig = Field(DraftConfig(), description="The workers that propose.")
    speculation: SpeculationConfig = Field(SpeculationConfig(), description="How deep, and how, to speculate.")
    router: RouterConfig = Field(RouterConfig(), description="The HTTP server.")
    tls: TlsConfig = Field(
        TlsConfig(), description="Between the programs: certificates and a shared token (`docs/SECURITY.md`)."
    )
    tracing: TracingConfig = Field(
        TracingConfig(), description="Spans of requests, by OpenTelemetry (`docs/OPERATING.md`)."
    )
    logging: LoggingConfig = Field(LoggingConfig(), description="The log of each program, on stderr.")
    simulation: SimulationConfig = Field(
        SimulationConfig(),
        description="What simulated engines do (`target.engine` and `draft.drafter` both `simulated`). The default "
        "curves are those of the 190M pair of `bench.models` on two cores.",
    )
    ray: RayConfig = Field(
        RayConfig(),
        description="The same programs as a Ray Serve application (`docs/RAY.md`); other launchers ignore it.",
    )
    placement: PlacementConfig = Field(
        PlacementConfig(), description="Where workers are, and how they hear of each other under Ray."
    )

    @model_validator(mode="after")
    def _replicas_within_bounds(self) -> Config:
        for pool, replicas, bounds in (
            ("target", self.target.replicas, self.ray.target),
            ("draft", self.draft.replicas, self.ray.draft),
        ):
            least, most = bounds.min_replicas, bounds.max_replicas
            if most is None:
                if self.ray.scaling.mode == "act":
                    raise ValueError(f"ray.scaling.mode act needs a bound: set ray.{pool}.max_replicas")
                continue
            if most < least:
                raise ValueError(f"ray.{pool}.max_replicas {most} is less than ray.{pool}.min_replicas {least}")
            if replicas > most:
                raise ValueError(f"{pool}.replicas {replicas} is more than ray.{pool}.max_replicas {most}")
        return self

    @model_validator(mode="after")
    def _further_drafts_can_work(self) -> Config:
        if self.ray.further_drafts and (not self.has_draft_workers or self.has_sidecars):
            raise ValueError("ray.further_drafts need a pool of draft workers: draft.placement pool, and k above 0")
        for name, further in self.ray.further_drafts.items():
            self.with_further_drafts(name)
            if further.draft and self.ray.scaling.mode != "manual":
                raise ValueError(
                    f"ray.scaling.mode {self.ray.scaling.mode} cannot tell draft models of one pool apart: set it to "
                    f"manual, or leave ray.further_drafts.{name}.draft out"
                )
        return self

    @model_validator(mode="after")
    def _in_process_can_work(self) -> Config:
        if not self.drafts_in_process:
            return self
        where = "draft.placement in-process"
        if self.target.engine == "vllm":
            raise ValueError(f"{where} needs target.engine torch, not vllm: set draft.placement to pool or sidecar")
        if self.draft.drafter == "vllm":
            raise ValueError(f"{where} needs a drafter of our own, not vllm: set draft.placement to pool or sidecar")
        if self.draft.drafter == "simulated" and self.target.engine != "simulated":
            raise ValueError(f"{where} has the drafter simulated for target.engine simulated, not {self.target.engine}")
        if self.draft.cpus is not None:
            raise ValueError(f"{where} leaves the drafter on the target's cores: set target.cpus, not draft.cpus")
        return self

    @model_validator(mode="after")
    def _rejection_has_probabilities(self) -> Config:
        if self.speculation.acceptance != "rejection":
            return self
        if self.target.engine != "torch":
            raise ValueError(f"acceptance rejection needs target.engine torch, not {self.target.engine}")
        if self.draft.drafter in ("ngram", "vllm", "simulated"):
            raise ValueError(
                f"acceptance rejection needs the draft's probabilities: draft.drafter {self.draft.drafter} gives none"
            )
        return self

    @model_validator(mode="after")
    def _only_vllm(self) -> Config:
        """Settings that an engine of ours does not have."""
        if self.target.engine != "vllm":
            _refuse_vllm_settings("target", self.target, f"target.engine {self.target.engine}")
            if self.speculation.acceptance == "engine":
                raise ValueError(f"acceptance engine needs target.engine vllm, not {self.target.engine}")
            if self.draft.drafter == "engine":
                raise ValueError(f"draft.drafter engine needs target.engine vllm, not {self.target.engine}")
            if self.target.takes_adapters:
                raise ValueError(
                    f"target.lora and target.lora_root need target.engine vllm: {self.target.engine} has no adapters"
                )
        if self.draft.drafter != "vllm":
            _refuse_vllm_settings("draft", self.draft, f"draft.drafter {self.draft.drafter}")
        if self.draft.drafter == "vllm" and self.draft.quantization is not None:
            raise ValueError(
                f"draft.quantization {self.draft.quantization} is the torch engine's: with draft.drafter vllm give "
                "draft.engine_args {quantization: ...}"
            )
        if self.draft.speculative_config and self.draft.drafter != "engine":
            raise ValueError(f"draft.speculative_config needs draft.drafter engine, not {self.draft.drafter}")
        return self

    @model_validator(mode="after")
    def _not_vllm(self) -> Config:
        """Settings that vLLM does not have, or has its own for."""
        if self.target.engine != "vllm":
            return self
        if self.speculation.tree_width > 1:
            raise ValueError(
                f"target.engine vllm verifies chains only: set tree_width 1, not {self.speculation.tree_width}"
            )
        if self.target.quantization is not None:
            raise ValueError(
                f"target.quantization {self.target.quantization} is the torch engine's: with target.engine vllm give "
                "target.engine_args {quantization: ...}"
            )
        return self

    @property
    def draft_model(self) -> str:
        """The model whose tokens the drafter knows: the target's own unless the drafter is a model of its own."""
        return self.draft.model if self.draft.drafter in ("model", "vllm") else self.target.model

    @property
    def has_drafter(self) -> bool:
        """Whether a drafter of ours proposes at all, wherever it is."""
        return self.speculation.num_speculative_tokens > 0 and self.draft.drafter != "engine"

    @property
    def drafts_in_process(self) -> bool:
        """Whether each target has its drafter in its own process."""
        return self.has_drafter and self.draft.placement == "in-process"

    @property
    def has_draft_workers(self) -> bool:
        """Whether there are draft workers at all."""
        return self.has_drafter and self.draft.placement != "in-process"

    def with_further_drafts(self, name: str) -> Config:
        """As the draft workers of `ray.further_drafts` have it that are called `name`. Raises ValueError."""
        draft = DraftConfig.model_validate(self.draft.model_dump() | self.ray.further_drafts[name].draft)
        return self.model_copy(update={"draft": draft})

    @property
    def num_further_drafts(self) -> int:
        return sum(further.replicas for further in self.ray.further_drafts.values())

    @property
    def has_sidecars(self) -> bool:
        """Whether they belong to one target each."""
        return self.has_draft_workers and self.draft.placement == "sidecar" and self.draft.replicas > 0


def _refuse_vllm_settings(section: str, worker: WorkerConfig, because: str) -> None:
    if worker.tensor_parallel_size > 1:
        raise ValueError(f"{section}.tensor_parallel_size {worker.tensor_parallel_size} needs vLLM: {because} has 1")
    if worker.engine_args:
        raise ValueError(f"{section}.engine_args are vLLM's: {because} has none")
