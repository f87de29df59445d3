"""What is compared: `vllm serve`, and Outrider without drafts, with the draft beside the target, and remote."""

from __future__ import annotations

import math
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.config import Config
from cluster.config_workers import WorkerConfig
from cluster.engine.memory_plan import GB, PlannedModel
from cluster.engine.model_config import ModelConfig
from cluster.errors import ConfigurationError, UnavailableError
from cluster.model_folder import resolve_model_folder
from services.http_call import call
from services.launch.child import Child, end_all
from services.launch.local import LocalCluster, free_ports
from services.prove.devices import Device
from services.prove.vllm_server import vllm_server
from services.running_cluster.access import Access

STOCK, PLAIN, BESIDE, REMOTE = "vllm serve", "k = 0", "beside", "remote"
MODEL = "target"  # what requests call the model, at every server

_READY_SECONDS = 900.0
_POLL_SECONDS = 0.2
_END_SECONDS = 15.0
_SPARE_TOKENS = 64  # of a sequence: drafts that are not committed, and blocks that are not full
_WORKER_BYTES = 3 * GB  # next to weights and KV cache: activations, a GPU's context and graphs, vLLM's processes
_SMALL_WORKER_BYTES = 1 * GB  # likewise, of the PyTorch engine on a CPU
_USABLE_SHARE = 0.9  # of the memory that is free


@dataclass(frozen=True, slots=True)
class Experiment:
    """What is measured, on which devices."""

    config: Config  # of both models, without placement and devices
    target: Device
    draft: Device
    streams: tuple[int, ...]
    prompts: Sequence[Sequence[int]]  # token IDs
    max_tokens: int
    answers: int  # of each stream in a repeat
    temperature: float
    repeats: int
    is_streamed: bool
    has_peer: bool
    acceptance_rate: float  # that the prediction assumes

    @property
    def prompt_tokens(self) -> int:
        """Mean."""
        return max(1, round(sum(map(len, self.prompts)) / len(self.prompts)))

    @property
    def beside_placement(self) -> str:
        """`draft.placement` of a draft on the target's device."""
        is_ours = self.config.target.engine != "vllm" and self.config.draft.drafter != "vllm"
        return "in-process" if is_ours else "sidecar"


@dataclass(frozen=True, slots=True)
class Counters:
    """Draft tokens since the start."""

    drafted: float
    accepted: float


class System(ABC):
    """A server that answers on 127.0.0.1 from `start` to `stop`."""

    name: str
    description: str
    url: str
    context: ssl.SSLContext | None = None

    @abstractmethod
    def start(self) -> None:
        """Returns when it answers. Raises ConfigurationError and UnavailableError."""

    @abstractmethod
    def stop(self, is_hurried: Callable[[], bool]) -> None:
        """Ends all of its processes, at once when `is_hurried`. May be called at any time, repeatedly."""

    def counters(self) -> Counters | None:
        """None: it does not draft. Raises ConfigurationError."""
        return None


class OutriderSystem(System):
    """A local cluster of router, target worker and perhaps draft worker."""

    def __init__(self, name: str, description: str, config: Config, target: Device, draft: Device) -> None:
        self.name = name
        self.description = description
        self.config = config
        self._environments = {"target": target.environment, "draft": draft.environment}
        self._cluster: LocalCluster | None = None
        self._access = Access()

    def start(self) -> None:
        self._cluster = LocalCluster(self.config, self._environments)
        self._access = Access.to_own(self._cluster)
        self.url, self.context = self._cluster.url, self._access.router.context
        self._cluster.start()
        programs = [*self._cluster.targets, *self._cluster.drafts, self._cluster.router]
        _wait(self._cluster.is_ready, programs)

    def stop(self, is_hurried: Callable[[], bool]) -> None:
        if self._cluster is not None:
            self._cluster.stop(is_hurried)
            self._cluster = None

    def counters(self) -> Counters:
        page = self._access.router.read_page(self.url)
        drafted, accepted = (page.sum(f"vllm:spec_decode_num_{kind}_tokens_total") for kind in ("draft", "accepted"))
        return Counters(drafted, accepted)


class StockSystem(System):
    """`vllm serve` of the target's model on the target's device."""

    name = STOCK

    def __init__(self, experiment: Experiment) -> None:
        target, device = experiment.config.target, experiment.target
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        self.description = f"vLLM's own server of the target on {device}, with its default settings"
        options: dict[str, Any] = {
            "model": str(resolve_model_folder(target.model)),
            "served-model-name": MODEL,
            "port": port,
            "dtype": "bfloat16" if target.dtype == "auto" else target.dtype,
            "max-num-seqs": target.max_num_seqs,
            "gpu-memory-utilization": target.memory_utilization,
            "disable-uvicorn-access-log": True,
        }
        if target.kv_cache_bytes is not None:
            options["kv-cache-memory-bytes"] = target.kv_cache_bytes
        if target.max_model_len is not None:
            options["max-model-len"] = target.max_model_len
        cpus = device.cpus if device.kind == "cpu" else None
        self._child = vllm_server(STOCK, options, cpus=cpus, environment=device.environment)

    def start(self) -> None:
        self._child.start()
        _wait(self._is_ready, [self._child])

    def stop(self, is_hurried: Callable[[], bool]) -> None:
        if self._child.has_ended():
            return
        end_all([self._child], _END_SECONDS, is_hurried)

    def _is_ready(self) -> bool:
        try:
            call(self.url, "GET", "/health")
        except ConfigurationError:
            return False
        return True


def _wait(is_ready: Callable[[], bool], programs: Sequence[Child]) -> None:
    """Raises UnavailableError if one of them ends, or they are not ready in time."""
    deadline = time.monotonic() + _READY_SECONDS
    while not is_ready():
        for program in programs:
            if program.has_ended():
                raise UnavailableError(f"the {program.name} ended with code {program.exit_code}; its message is above")
        if time.monotonic() > deadline:
            raise UnavailableError(f"it is not ready after {_READY_SECONDS:.0f} s")
        time.sleep(_POLL_SECONDS)


def make_systems(experiment: Experiment) -> list[System]:
    """In the order in which they are measured."""
    config, target, draft = experiment.config, experiment.target, experiment.draft
    stock = [StockSystem(experiment)] if experiment.has_peer else []
    placement = experiment.beside_placement
    where = "in its process" if placement == "in-process" else "in a draft worker"
    return [
        *stock,
        OutriderSystem(PLAIN, f"Outrider without drafts on {target}", _plain(config, target), target, draft),
        OutriderSystem(
            BESIDE,
            f"Outrider with target and draft on {target}, the draft {where}",
            _placed(config, target, target, placement),
            target,
            target,
        ),
        OutriderSystem(
            REMOTE,
            f"Outrider with the target on {target} and a draft worker on {draft}",
            _placed(config, target, draft, "pool"),
            target,
            draft,
        ),
    ]


def with_room(config: Config, streams: Sequence[int], num_tokens: int) -> Config:
    """`config` with room for as many sequences of `num_tokens` each, in both pools.

    The same limits hold for `vllm serve`. A KV cache that is sized by `memory_utilization` stays so.
    """
    num_seqs, max_sequence_tokens = max(streams), num_tokens + _SPARE_TOKENS

    def roomy(worker: Any, model: str, max_model_len: int | None) -> Any:
        update: dict[str, object] = {"max_num_seqs": max(num_seqs, worker.max_num_seqs)}
        planned = _planned(model, worker.dtype)
        if worker.kv_cache_bytes is not None and planned is not None:
            needed = math.ceil(1.25 * num_seqs * max_sequence_tokens * planned.kv_bytes_per_token)
            update["kv_cache_bytes"] = max(needed, worker.kv_cache_bytes)
        return worker.model_copy(update=update | {"max_model_len": max_model_len})

    target, draft = config.target, config.draft
    return config.model_copy(
        update={
            "target": roomy(target, target.model, target.max_model_len or _clamped(max_sequence_tokens, target.model)),
            "draft": roomy(draft, config.draft_model, draft.max_model_len),
        }
    )


def fit_together(experiment: Experiment) -> bool:
    """Whether the memory that is free holds all systems at once."""
    config, target, draft = experiment.config, experiment.target, experiment.draft
    of_target = _num_bytes(config.target, config.target.model, target, is_vllm=config.target.engine == "vllm")
    of_peer = _num_bytes(config.target, config.target.model, target, is_vllm=True)
    is_vllm = config.draft.drafter == "vllm"
    beside, remote = (
        _num_bytes(config.draft, config.draft_model, device, is_vllm=is_vllm) for device in (target, draft)
    )
    if of_target is None or of_peer is None or beside is None or remote is None:
        return False
    needed = {target: 3 * of_target + experiment.has_peer * of_peer + beside}
    needed[draft] = needed.get(draft, 0.0) + remote
    on_host = sum(size for device, size in needed.items() if device.kind == "cpu")
    on_gpus = {device: size for device, size in needed.items() if device.kind == "cuda"}
    return on_host <= _USABLE_SHARE * _host_bytes() and all(
        size <= _USABLE_SHARE * _gpu_bytes(device) for device, size in on_gpus.items()
    )


def sharing_memory(config: Config, device: Device) -> Config:
    """`config` for a target that vLLM starts on a GPU where others are.

    vLLM refuses to start unless `memory_utilization` of the GPU is free, also where the KV cache has a size of its own.
    """
    needed = _num_bytes(config.target, config.target.model, device, is_vllm=True)
    if device.kind == "cpu" or needed is None:
        return config
    share = min(config.target.memory_utilization, needed / _gpu_bytes(device, total=True))
    return config.model_copy(update={"target": config.target.model_copy(update={"memory_utilization": share})})


def _plain(config: Config, target: Device) -> Config:
    return config.model_copy(
        update={
            "target": config.target.model_copy(update=target.settings),
            "speculation": config.speculation.model_copy(update={"num_speculative_tokens": 0}),
        }
    )


def _placed(config: Config, target: Device, draft: Device, placement: str) -> Config:
    cores = {"cpus": None} if placement == "in-process" else {}  # a drafter in the target's process has its cores
    return config.model_copy(
        update={
            "target": config.target.model_copy(update=target.settings),
            "draft": config.draft.model_copy(update=draft.settings | cores | {"placement": placement}),
        }
    )


def _clamped(num_tokens: int, model: str) -> int:
    """By what the model allows, if that is known."""
    try:
        return min(num_tokens, ModelConfig.from_folder(resolve_model_folder(model)).max_position_embeddings)
    except ConfigurationError:
        return num_tokens


def _num_bytes(worker: WorkerConfig, model: str, device: Device, *, is_vllm: bool) -> float | None:
    """What a worker takes of the memory of `device`; None: not known, or a share of what is there."""
    planned = _planned(model, worker.dtype)
    if planned is None or worker.kv_cache_bytes is None:
        return None
    own = _WORKER_BYTES if is_vllm or device.kind == "cuda" else _SMALL_WORKER_BYTES
    return planned.weight_bytes + worker.kv_cache_bytes + own


def _planned(model: str, dtype: str) -> PlannedModel | None:
    """None: of a model that only vLLM knows."""
    try:
        return PlannedModel.parse(f"{resolve_model_folder(model)}:{'fp32' if dtype == 'float32' else 'bf16'}")
    except ConfigurationError:
        return None


def _host_bytes() -> float:
    with open("/proc/meminfo", encoding="ascii") as file:
        return next(1024.0 * int(line.split()[1]) for line in file if line.startswith("MemAvailable"))


def _gpu_bytes(device: Device, *, total: bool = False) -> float:
    import torch

    return float(torch.cuda.mem_get_info(device.index)[int(total)])
