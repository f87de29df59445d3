"""The configuration: one YAML tree for every program, read once. An unknown key is an error.

`cluster.config.file` reads it. Values that can be derived are properties.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from cluster.config.ray import PlacementConfig, RayConfig
from cluster.config.router import RouterConfig
from cluster.config.simulation import SimulationConfig
from cluster.config.speculation import SpeculationConfig
from cluster.config.tls import TlsConfig
from cluster.config.types import LogFormat, LogLevel, Section
from cluster.config.workers import READ_STATES, DraftConfig, TargetConfig, WorkerConfig, model_name

V2_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"Environment variable of vLLM: 1 for its V2 model runner, 0 for V1."
_COUPLED_ON_V2 = ("draft_model", "eagle", "eagle3", "mtp")  # methods of vLLM that use the shared noise on V2
_VLLM_METHODS = {"eagle": "eagle3, model: ...", "medusa": "medusa, model: ...", "mtp": "mtp"}


class TracingConfig(Section):
    """Export of requests' spans by OTLP over HTTP."""

    endpoint: Annotated[str, Field(pattern=r"^https?://[^\s/]+\S*$")] | None = Field(
        None,
        description="OTLP collector, such as `http://localhost:4318`; spans are sent to its `/v1/traces`. null: no "
        "tracing. Needs the extra `outrider[tracing]`",
    )


class LoggingConfig(Section):
    level: LogLevel = Field(
        "info", description="lowest level that is logged: debug, info, warning or error; the same as `--log-level`"
    )
    format: LogFormat = Field(
        "text", description="text: `time level program: message`; json: one object per line; the same as `--log-format`"
    )


class Config(Section):
    target: TargetConfig = Field(TargetConfig(), description="The workers that verify and decide.")
    draft: DraftConfig = Field(DraftConfig(), description="The workers that propose.")
    speculation: SpeculationConfig = Field(SpeculationConfig(), description="Depth and method of speculation.")
    router: RouterConfig = Field(RouterConfig(), description="The HTTP server.")
    tls: TlsConfig = Field(
        TlsConfig(), description="Certificates and a shared token between the programs (`docs/SECURITY.md`)."
    )
    tracing: TracingConfig = Field(
        TracingConfig(), description="OpenTelemetry spans of requests (`docs/MONITORING.md`)."
    )
    logging: LoggingConfig = Field(LoggingConfig(), description="The log of each program, on stderr.")
    simulation: SimulationConfig = Field(
        SimulationConfig(),
        description="Behaviour of simulated engines (`target.engine` and `draft.drafter` both `simulated`). The "
        "default curves are those of the 190M pair of `bench.models` on two cores.",
    )
    ray: RayConfig = Field(
        RayConfig(),
        description="The same programs as a Ray Serve application (`docs/RAY.md`); other launchers ignore it.",
    )
    placement: PlacementConfig = Field(
        PlacementConfig(), description="Location of the workers, and their registry under Ray."
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
                    f"ray.scaling.mode {self.ray.scaling.mode} cannot distinguish draft models of one pool: set it "
                    f"to manual, or leave ray.further_drafts.{name}.draft out"
                )
        return self

    @model_validator(mode="after")
    def _heads_can_work(self) -> Config:
        if not self.draft.reads_states or not self.has_drafter:
            return self
        drafter = f"draft.drafter {self.draft.drafter}"
        if not self.drafts_in_process:
            raise ValueError(
                f"{drafter} reads the target's hidden states: leave draft.placement out, or set it to in-process, not "
                f"{self.draft.placement}"
            )
        if self.target.engine == "vllm":
            raise ValueError(
                f"{drafter} needs target.engine torch, not vllm: set draft.drafter engine and draft.speculative_config "
                f"{{method: {_VLLM_METHODS[self.draft.drafter]}}}"
            )
        if self.target.engine != "torch":
            raise ValueError(f"{drafter} needs target.engine torch, not {self.target.engine}")
        if self.draft.in_process_threads == "own":
            raise ValueError(f"{drafter} drafts in the target's thread: leave draft.in_process_threads out")
        return self

    @model_validator(mode="after")
    def _in_process_can_work(self) -> Config:
        if not self.drafts_in_process:
            return self
        where = "draft.placement in-process"
        if self.target.engine == "vllm" and self.draft.drafter != "model":
            raise ValueError(f"{where} needs draft.drafter model with target.engine vllm, not {self.draft.drafter}")
        if self.draft.drafter == "vllm":
            raise ValueError(
                f"{where} cannot use vllm: set draft.placement to pool or sidecar, or choose another draft.drafter"
            )
        if self.draft.drafter == "simulated" and self.target.engine != "simulated":
            raise ValueError(f"{where} has the drafter simulated for target.engine simulated, not {self.target.engine}")
        if self.draft.in_process_threads == "device":
            self._check_device_rounds()
        if self.draft.cpus is not None:
            raise ValueError(f"{where} leaves the drafter on the target's cores: set target.cpus, not draft.cpus")
        return self

    def _check_device_rounds(self) -> None:
        needed = {
            "target.engine": (self.target.engine, "torch"),
            "draft.drafter": (self.draft.drafter, "model"),
            "speculation.acceptance": (self.speculation.acceptance, "coupled"),
            "speculation.tree_width": (self.speculation.tree_width, 1),
        }
        for setting, (value, supported) in needed.items():
            if value != supported:
                raise ValueError(f"draft.in_process_threads device needs {setting} {supported}, not {value}")

    @model_validator(mode="after")
    def _controller_can_choose(self) -> Config:
        limit, device = self.speculation.output_token_ms, self.draft.in_process_threads == "device"
        chooser = None
        if self.draft.drafter == "engine":
            chooser = "with draft.drafter engine vLLM does: set another draft.drafter"
        elif self.drafts_in_process and self.target.engine == "vllm":
            chooser = "with draft.placement in-process vLLM's step does: set draft.placement to sidecar"
        elif self.drafts_in_process and device:
            chooser = "with draft.in_process_threads device the device does: set draft.in_process_threads to auto"
        if chooser is not None and self.speculation.num_speculative_tokens:
            if limit is not None:
                raise ValueError(
                    f"speculation.output_token_ms {limit:g} needs the controller to choose k, but {chooser}, or leave "
                    "the limit out"
                )
            if self.speculation.suffix_bytes:
                raise ValueError(
                    f"speculation.suffix_bytes {self.speculation.suffix_bytes} needs the controller to choose drafts, "
                    f"but {chooser}, or leave it out"
                )
        return self

    @model_validator(mode="after")
    def _host_cpu_can_work(self) -> Config:
        if not self.drafts_on_host_cpu:
            return self
        where = "draft.placement host-cpu"
        if self.draft.device != "cpu":
            raise ValueError(
                f"{where} contradicts draft.device {self.draft.device}: leave draft.device out, or set draft.placement "
                "to sidecar for a draft on a GPU"
            )
        if self.draft.drafter == "vllm":
            raise ValueError(
                f"{where} cannot use draft.drafter vllm, which is built either for GPUs or for CPUs: set "
                "draft.drafter to model, or draft.placement to sidecar"
            )
        shared = sorted(set(self.target.cpus or ()) & set(self.draft.cpus or ()))
        if shared:
            raise ValueError(
                f"{where} gives the draft cores that its target does not use, but {shared} are in both target.cpus "
                "and draft.cpus: leave draft.cpus out, or set draft.placement to sidecar to share cores"
            )
        return self

    @model_validator(mode="after")
    def _rejection_has_probabilities(self) -> Config:
        if self.speculation.acceptance != "rejection":
            return self
        if self.target.engine != "torch":
            raise ValueError(f"acceptance rejection needs target.engine torch, not {self.target.engine}")
        if self.draft.drafter in ("ngram", *READ_STATES, "vllm", "simulated"):
            raise ValueError(
                "acceptance rejection needs a second computation of the draft's probabilities, which draft.drafter "
                f"{self.draft.drafter} does not support: set acceptance coupled, or choose another draft.drafter"
            )
        return self

    @model_validator(mode="after")
    def _context_tokens_can_work(self) -> Config:
        why = self._why_all_tokens_are_read() if isinstance(self.draft.context_tokens, int) else None
        if why is not None and self.has_drafter:
            raise ValueError(f"draft.context_tokens {self.draft.context_tokens}: {why}, or set it to auto")
        return self

    def _why_all_tokens_are_read(self) -> str | None:
        """Returns why the draft must read all tokens of a prompt, and the remedy; None if it may read fewer."""
        drafter = self.draft.drafter
        if self.drafts_in_vllm or drafter not in ("model", "parallel", "self-int4", "simulated"):
            which = "vLLM's draft" if self.drafts_in_vllm else f"draft.drafter {drafter}"
            return f"{which} reads all tokens: leave draft.context_tokens out"
        if self.speculation.acceptance == "rejection":
            return "acceptance rejection computes the draft's probabilities from all tokens: set acceptance coupled"
        if self.drafts_in_process and self.draft.in_process_threads == "device":
            return (
                "with in_process_threads device the draft has the target's block tables: set draft.in_process_threads "
                "auto"
            )
        return None

    @property
    def context_tokens(self) -> int | Literal["auto"] | None:
        """`draft.context_tokens`; None where auto means all tokens."""
        return None if self._why_all_tokens_are_read() else self.draft.context_tokens

    @model_validator(mode="after")
    def _vllm_settings_need_vllm(self) -> Config:
        """Raises ValueError if a setting of vLLM is used with another engine."""
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
    def _vllm_supports_all_settings(self) -> Config:
        """Raises ValueError if vLLM is used with a setting that it does not support, or for which it has its own."""
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
        """The model whose tokenizer the drafter uses: `draft.model` if the drafter has it, otherwise the target."""
        return self.draft.model if self.draft_has_tokenizer else self.target.model

    @property
    def draft_has_tokenizer(self) -> bool:
        """True if the drafter has a model with a tokenizer of its own."""
        return self.draft.drafter in ("model", "parallel", "vllm")

    @property
    def drafts_in_vllm(self) -> bool:
        """True if vLLM runs the draft model."""
        return self.draft.drafter == "vllm" or (self.drafts_in_process and self.target.engine == "vllm")

    @property
    def names_target(self) -> bool:
        """True if `target.model` was set, so that a separately started draft worker knows its target's tokenizer."""
        return "model" in self.target.model_fields_set

    def tokenizer_mismatch(self, num_tokens: int) -> str:
        """Returns the error message for a draft that has none of the target's `num_tokens` tokens."""
        is_default = self.draft_model == DraftConfig.model_fields["model"].default
        draft = f"default draft {self.draft_model!r}" if is_default else f"draft {self.draft_model!r}"
        remedy = "choose a draft with the target's tokenizer, or one with many of its tokens"
        if is_default:
            remedy += (
                " (--draft.model), draft from the text itself (--draft.drafter ngram), or serve without speculation "
                "(--speculation.num_speculative_tokens 0)"
            )
        return (
            f"the {draft} cannot draft for the target {self.target.model!r}: its tokenizer has none of the "
            f"{num_tokens} tokens: {remedy}"
        )

    @property
    def served_model_id(self) -> str:
        """The name in answers: the first of `router.served_model_name`, or the name of the target's model."""
        for name in self.router.served_model_name:
            if "=" not in name:
                return name
        return "simulated" if self.target.engine == "simulated" else model_name(self.target.model)

    @property
    def model_aliases(self) -> dict[str, str]:
        """Further names in requests, each with the name of its model or adapter."""
        pairs = [name.partition("=") for name in self.router.served_model_name]
        return {alias: name or self.served_model_id for alias, _, name in pairs if alias != self.served_model_id}

    @property
    def has_drafter(self) -> bool:
        """True if one of this project's drafters makes drafts, in any process."""
        return self.speculation.num_speculative_tokens > 0 and self.draft.drafter != "engine"

    @property
    def drafts_in_process(self) -> bool:
        """True if each target has its drafter in its own process."""
        return self.has_drafter and self.draft.placement == "in-process"

    @property
    def has_draft_workers(self) -> bool:
        """True if there are draft workers."""
        return self.has_drafter and self.draft.placement != "in-process"

    @property
    def needs_v1_runner(self) -> str | None:
        """The setting that vLLM's V2 model runner does not support with our scheduler; None if it supports all."""
        if self.target.takes_adapters:
            return "target.lora or target.lora_root"
        if self.speculation.acceptance == "engine":
            return "speculation.acceptance engine"
        method = self.draft.speculative_config.get("method")
        if self.draft.drafter == "engine" and method not in _COUPLED_ON_V2:
            return f"draft.speculative_config.method {method}"
        arguments = self.target.engine_args  # all ranks read the drafts from shared memory of one machine
        if arguments.get("nnodes", 1) != 1:
            return "target.engine_args.nnodes"
        if arguments.get("distributed_executor_backend") not in (None, "mp"):
            return "target.engine_args.distributed_executor_backend"
        return None

    def with_further_drafts(self, name: str) -> Config:
        """Returns the configuration of the draft workers that `ray.further_drafts` calls `name`. Raises ValueError."""
        draft = DraftConfig.model_validate(self.draft.model_dump() | self.ray.further_drafts[name].draft)
        return self.model_copy(update={"draft": draft})

    @property
    def num_further_drafts(self) -> int:
        return sum(further.replicas for further in self.ray.further_drafts.values())

    @property
    def has_sidecars(self) -> bool:
        """True if each draft worker belongs to one target."""
        are_beside = self.draft.placement in ("sidecar", "host-cpu")
        return self.has_draft_workers and are_beside and self.draft.replicas > 0

    @property
    def drafts_on_host_cpu(self) -> bool:
        """True if the draft workers are sidecars that compute on CPU cores of their targets' hosts."""
        return self.has_sidecars and self.draft.placement == "host-cpu"


def _refuse_vllm_settings(section: str, worker: WorkerConfig, because: str) -> None:
    if worker.tensor_parallel_size > 1:
        raise ValueError(f"{section}.tensor_parallel_size {worker.tensor_parallel_size} needs vLLM: {because} has 1")
    if worker.engine_args:
        raise ValueError(f"{section}.engine_args are vLLM's: {because} has none")
