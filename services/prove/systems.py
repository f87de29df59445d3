"""The systems to compare: `vllm serve`, and Outrider without drafts and in two placements."""

from __future__ import annotations

import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.config import Config
from cluster.errors import ConfigurationError, UnavailableError
from cluster.model_folder import resolve_model_folder
from services.http_call import call
from services.launch.child import Child, end_all
from services.launch.local import LocalCluster, free_ports
from services.prove.devices import Device
from services.prove.vllm_server import vllm_server
from services.running_cluster.access import Access

STOCK, PLAIN, BESIDE, REMOTE = "vllm serve", "k = 0", "beside", "remote"
MODEL = "target"  # the model's name at every server

_READY_SECONDS = 900.0
_POLL_SECONDS = 0.2
_END_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Experiment:
    """The models, devices and load of a measurement."""

    config: Config  # models' settings, without placement and devices
    target: Device
    draft: Device
    streams: tuple[int, ...]
    prompts: Sequence[Sequence[int]]  # prompts as token IDs
    max_tokens: int
    answers: int  # answers per stream and repeat
    temperature: float
    repeats: int
    is_streamed: bool
    has_peer: bool
    acceptance_rate: float  # assumed by the prediction

    @property
    def prompt_tokens(self) -> int:
        """Mean number of tokens of a prompt."""
        return max(1, round(sum(map(len, self.prompts)) / len(self.prompts)))

    @property
    def beside_placement(self) -> str:
        """`draft.placement` of a draft on the target's device."""
        is_ours = self.config.target.engine != "vllm" and self.config.draft.drafter != "vllm"
        return "in-process" if is_ours else "sidecar"


@dataclass(frozen=True, slots=True)
class Counters:
    """Numbers of draft tokens since the system's start."""

    drafted: float
    accepted: float


class System(ABC):
    """A server on 127.0.0.1 that runs from `start` to `stop` and answers once `wait_ready` has returned."""

    name: str
    description: str
    url: str
    context: ssl.SSLContext | None = None

    @abstractmethod
    def start(self) -> None:
        """Starts the processes of the system. Raises ConfigurationError.

        Must not be interrupted, because `stop` could miss a process that is being started.
        """

    @abstractmethod
    def wait_ready(self) -> None:
        """Waits until the system answers. Raises ConfigurationError, or UnavailableError if it never does."""

    @abstractmethod
    def stop(self, is_hurried: Callable[[], bool]) -> None:
        """Ends all processes of the system; at once if `is_hurried` returns True.

        May be called at any time, also repeatedly.
        """

    def counters(self) -> Counters | None:
        """Returns the counters; None if the system has none. Raises ConfigurationError."""
        return None


class OutriderSystem(System):
    """A local cluster: a router, a target worker, and in some placements a draft worker."""

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

    def wait_ready(self) -> None:
        assert self._cluster is not None, f"{self.name} was not started"
        _wait(self._cluster.is_ready, [*self._cluster.targets, *self._cluster.drafts, self._cluster.router])

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

    def wait_ready(self) -> None:
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
    """Waits until `is_ready`. Raises UnavailableError if a program ends, or after _READY_SECONDS."""
    deadline = time.monotonic() + _READY_SECONDS
    while not is_ready():
        for program in programs:
            if program.has_ended():
                raise UnavailableError(f"the {program.name} ended with code {program.exit_code}; its message is above")
        if time.monotonic() > deadline:
            raise UnavailableError(f"it is not ready after {_READY_SECONDS:.0f} s")
        time.sleep(_POLL_SECONDS)


def make_systems(experiment: Experiment) -> list[System]:
    """Makes the systems, in the order in which they are measured."""
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


def _plain(config: Config, target: Device) -> Config:
    return config.model_copy(
        update={
            "target": config.target.model_copy(update=target.settings),
            "speculation": config.speculation.model_copy(update={"num_speculative_tokens": 0}),
        }
    )


def _placed(config: Config, target: Device, draft: Device, placement: str) -> Config:
    cores = {"cpus": None} if placement == "in-process" else {}  # a drafter in the target's process uses its cores
    return config.model_copy(
        update={
            "target": config.target.model_copy(update=target.settings),
            "draft": config.draft.model_copy(update=draft.settings | cores | {"placement": placement}),
        }
    )
