"""The sections `target` and `draft` of the configuration: one pool of workers each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from cluster.config.types import AdapterName, Address, DrainSeconds, FilePath, HostPort, Port, Section, is_host_port
from cluster.errors import ConfigurationError

DEFAULT_KV_CACHE_BYTES = 256 * 2**20

Dtype = Literal["auto", "float32", "bfloat16"]
QuantizationName = Literal["int8", "int4"]
EngineName = Literal["torch", "vllm", "simulated"]
DrafterName = Literal["model", "ngram", "self-int4", "layer-skip", "parallel", "vllm", "engine", "simulated"]
LayerChoice = Literal["even", "last-half"] | tuple[Annotated[int, Field(ge=0)], ...]
Numerics = Literal["fast", "invariant"]


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
        description="where kv_cache_bytes is null, share of the GPU memory without the weights that the KV cache gets",
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
        description="milliseconds that prompts may add to a step: a long one is computed in several steps, between "
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
        "batch and the cut of the work, or no start at all; engine torch needs AVX-512 for it on a CPU, and on a "
        "GPU Triton and no quantization",
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="auto: the model's generation_config.json has the temperature, top_p, top_k, min_p and "
        "repetition_penalty of requests that leave them open, as in vLLM; none: OpenAI's defaults",
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
    placement: Literal["auto", "pool", "sidecar", "host-cpu", "in-process"] = Field(
        "auto",
        description="pool: every target uses every draft worker; sidecar: `replicas` draft workers with each target, "
        "on its host and for it alone; host-cpu: a sidecar with `device` cpu, on cores of the host that its target "
        "does not use; in-process: a drafter in each target's process, and no draft workers (with vLLM on its V2 "
        "runner: on the target's GPU); auto: pool, but "
        "in-process where `outrider serve` finds one target and its draft on a few cores, and host-cpu where the "
        "target has a GPU, `draft.device` is cpu and enough cores are free",
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
        description="model: `draft.model`; parallel: the same, all tokens of a proposal in one step, by a model that "
        "was trained for it (PARD; `outrider distill --parallel`); ngram: repetitions in the text so far; self-int4, "
        "layer-skip: the target's model in 4 bits, or some of its layers; vllm: `draft.model`, run by vLLM; engine: no "
        "draft worker, the target's engine drafts by itself, see `speculative_config`; simulated: for a simulated "
        "target",
    )
    speculative_config: dict[str, Any] = Field(
        {},
        description="with drafter engine: vLLM's own `speculative_config`, such as `{method: ngram, "
        "prompt_lookup_max: 4}`; where it names no model, `draft.model` is meant",
    )
    layers: LayerChoice = Field("even", description="which layers layer-skip keeps: even, last-half or a list")
    ngram_min: PositiveInt = Field(1, description="tokens of the shortest run that ngram looks up")
    ngram_max: PositiveInt = Field(4, description="tokens of the longest run that ngram looks up")

    @model_validator(mode="before")
    @classmethod
    def _host_cpu_is_a_device(cls, values: Any) -> Any:
        """Sets `device` to cpu for placement host-cpu, so that every reader of `device` finds the decision."""
        if isinstance(values, dict) and values.get("placement") == "host-cpu":
            device = values.get("device", "auto")
            return values | {"device": "cpu" if device == "auto" else device}
        return values

    @model_validator(mode="after")
    def _runs_have_a_length(self) -> DraftConfig:
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min {self.ngram_min} exceeds ngram_max {self.ngram_max}")
        return self


def model_name(model: str) -> str:
    """Returns `model`, or the folder's name if it is a path."""
    path = Path(model).expanduser()
    if model.startswith((".", "/", "~")) or path.is_dir():
        return path.resolve().name
    return model
