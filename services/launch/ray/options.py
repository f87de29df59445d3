"""Translates the configuration for Serve: the options of each pool's deployment. Does not import Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from cluster.config import Config
from cluster.config.ray import RayPoolConfig, RayProgramConfig
from cluster.config.workers import WorkerConfig
from cluster.errors import ConfigurationError
from cluster.placement.registry import Pool
from cluster.placement.scaling import Bounds, ScaledPool

_END_SECONDS = 15.0  # in addition to the drain time, for the replica to see its program's end and to stop
_HEALTH_PERIOD_SECONDS = 1.0
_HEALTH_TIMEOUT_SECONDS = 10.0  # longer than a program's own start-up limit, so that its error is reported
_MAX_STARTS = 3  # a program that cannot start with its settings will not start the next time
# In the actor, which forks with gRPC's threads running; see tests/conftest.py.
_ENVIRONMENT = {"GRPC_ENABLE_FORK_SUPPORT": "0"}


@dataclass(frozen=True, slots=True)
class DeploymentOptions:
    """Arguments of `serve.deployment`. `name`: the pool, or `draft-NAME` for the entry NAME of `ray.further_drafts`."""

    name: str
    num_replicas: int
    ray_actor_options: dict[str, Any]
    graceful_shutdown_timeout_s: float
    max_ongoing_requests: int = 100
    max_replicas_per_node: int | None = None
    health_check_period_s: float = _HEALTH_PERIOD_SECONDS
    health_check_timeout_s: float = _HEALTH_TIMEOUT_SECONDS
    graceful_shutdown_wait_loop_s: float = 0.1
    max_constructor_retry_count: int = _MAX_STARTS
    max_surge_percent: int = 0  # a surplus replica would wait forever for a GPU
    placement_group_bundles: list[dict[str, float]] | None = None  # the replica's, then those of its sidecars
    placement_group_strategy: str | None = None
    placement_group_bundle_label_selector: list[dict[str, str]] | None = None

    def keywords(self) -> dict[str, Any]:
        """Arguments of `Deployment.options`."""
        return {name: getattr(self, name) for name in self.__slots__}


def pool_of(deployment: str) -> Pool:
    """Returns the pool of a deployment's workers."""
    pool, _, _ = deployment.partition("-")
    assert pool in ("router", "target", "draft"), deployment
    return cast(Pool, pool)


def config_of_deployment(config: Config, deployment: str) -> Config:
    """Returns the configuration of a deployment's workers."""
    _, is_further, name = deployment.partition("-")
    return config.with_further_drafts(name) if is_further else config


def deployment_options(config: Config) -> tuple[DeploymentOptions, ...]:
    """Returns the options of each deployment, the router first. Raises ConfigurationError for unusable settings."""
    _refuse_what_cannot_work(config)
    ray = config.ray
    admin_port = 0 if config.router.admin_listen is None else int(config.router.admin_listen.rpartition(":")[2])
    is_port_fixed = config.router.port != 0 or admin_port != 0
    pools = [
        DeploymentOptions(
            "router",
            ray.router.replicas,
            _actor_options(ray.router),
            # Serve waits for requests that came through its proxy before the router drains those that came directly.
            2 * config.router.drain_seconds + _END_SECONDS,
            max_ongoing_requests=config.router.max_waiting_requests + 100,  # the router itself answers 503 when full
            max_replicas_per_node=1 if is_port_fixed and ray.router.replicas > 1 else None,
            max_surge_percent=0 if is_port_fixed else 100,
        ),
        _target_options(config),
    ]
    if config.has_draft_workers and not config.has_sidecars and config.draft.replicas > 0:
        pools.append(_draft_options("draft", config, ray.draft, config.draft.replicas))
    for name, further in ray.further_drafts.items():
        own = config.with_further_drafts(name)
        pools.append(_draft_options(f"draft-{name}", own, further, further.replicas))
    return tuple(pools)


def sidecar_options(config: Config) -> dict[str, Any]:
    """Returns the options of a draft worker's actor in its target's placement group."""
    return {
        name: value
        for name, value in _draft_actor_options(config, config.ray.draft).items()
        if name != "label_selector"
    }


def replicas_within_bounds(config: Config, pool: ScaledPool, num_replicas: int) -> int:
    """Returns `num_replicas`, or the nearest number that `ray.target` or `ray.draft` allows."""
    bounds = config.ray.target if pool == "target" else config.ray.draft
    return Bounds(bounds.min_replicas, bounds.max_replicas).limit(num_replicas)


def _target_options(config: Config) -> DeploymentOptions:
    actor = _worker_options(config.target, config.ray.target)
    drain_seconds = config.target.drain_seconds + _END_SECONDS
    if not config.has_sidecars:
        return DeploymentOptions("target", config.target.replicas, actor, drain_seconds)
    members = [actor, *[_draft_actor_options(config, config.ray.draft)] * config.draft.replicas]
    selectors = [member.get("label_selector", {}) for member in members]
    return DeploymentOptions(
        "target",
        config.target.replicas,
        {name: value for name, value in actor.items() if name != "label_selector"},
        drain_seconds + config.draft.drain_seconds,  # sidecars end when no target calls them any more
        placement_group_bundles=[_bundle(member) for member in members],
        placement_group_strategy="STRICT_PACK",
        placement_group_bundle_label_selector=selectors if any(selectors) else None,
    )


def _draft_options(name: str, config: Config, pool: RayPoolConfig, num_replicas: int) -> DeploymentOptions:
    actor = _draft_actor_options(config, pool)
    return DeploymentOptions(name, num_replicas, actor, config.draft.drain_seconds + _END_SECONDS)


def _draft_actor_options(config: Config, pool: RayPoolConfig) -> dict[str, Any]:
    options = _worker_options(config.draft, pool)
    if config.drafts_on_host_cpu:
        options["num_cpus"] = max(options["num_cpus"], host_cpu_threads(config))
    return options


def host_cpu_threads(config: Config) -> int:
    """Returns the compute threads of a sidecar with `draft.placement: host-cpu`: one per core of its bundle."""
    draft = config.draft
    return draft.threads or len(draft.cpus or ()) or int(config.ray.draft.num_cpus)


def _bundle(actor: Mapping[str, Any]) -> dict[str, float]:
    """Returns the resources that an actor with these options takes of its node."""
    bundle = {"CPU": actor["num_cpus"], "GPU": actor["num_gpus"], **actor.get("resources", {})}
    if "accelerator_type" in actor:
        bundle[f"accelerator_type:{actor['accelerator_type']}"] = 0.001  # as Ray itself requests it
    return {name: amount for name, amount in bundle.items() if amount}


def _worker_options(worker: WorkerConfig, pool: RayPoolConfig) -> dict[str, Any]:
    has_gpus = worker.device == "cuda" or pool.accelerator_type is not None
    default_gpus = float(worker.tensor_parallel_size) if has_gpus else 0.0
    options = _actor_options(pool, default_gpus if pool.num_gpus is None else pool.num_gpus)
    if pool.accelerator_type is not None:
        options["accelerator_type"] = pool.accelerator_type
    return options


def _actor_options(program: RayProgramConfig, num_gpus: float = 0.0) -> dict[str, Any]:
    options: dict[str, Any] = {
        "num_cpus": program.num_cpus,
        "num_gpus": num_gpus,
        "runtime_env": {"env_vars": dict(_ENVIRONMENT)},
    }
    for name in ("resources", "label_selector"):
        if value := getattr(program, name):
            options[name] = value
    return options


def _refuse_what_cannot_work(config: Config) -> None:
    if config.simulation.needs_proxy:
        raise ConfigurationError(
            "simulation.round_trip_ms and simulation.loss need the launcher's proxy, which does not exist under "
            "Ray: set both to 0, or use --launcher local"
        )
    if config.drafts_on_host_cpu:
        _refuse_host_cpu_without_cores(config)
    workers = {"target": (config.target, config.ray.target), "draft": (config.draft, config.ray.draft)}
    for name, (worker, pool) in workers.items():
        if worker.engine_args.get("distributed_executor_backend") == "ray" or worker.engine_args.get("nnodes", 1) != 1:
            raise ConfigurationError(
                f"{name}.engine_args distribute one {name} over nodes, which is not supported under Ray: a worker "
                "has all its GPUs on one node. Leave distributed_executor_backend and nnodes out, and set "
                f"{name}.tensor_parallel_size to the GPUs of a node at most"
            )
        num_gpus, size = pool.num_gpus, worker.tensor_parallel_size
        if num_gpus is not None and 0 < num_gpus < size:
            raise ConfigurationError(
                f"ray.{name}.num_gpus {num_gpus:g} is less than {name}.tensor_parallel_size {size}: a replica has all "
                "GPUs of its worker; set it to null"
            )


def _refuse_host_cpu_without_cores(config: Config) -> None:
    pool, where = config.ray.draft, "draft.placement host-cpu"
    if host_cpu_threads(config) < 1:
        raise ConfigurationError(
            f"{where} computes on the cores that Ray reserves for it, and ray.draft.num_cpus is {pool.num_cpus:g}: "
            "set it to the number of cores that the node can spare for each draft, such as 16"
        )
    if pool.num_gpus or pool.accelerator_type is not None:
        raise ConfigurationError(
            f"{where} needs no GPU: leave ray.draft.num_gpus and ray.draft.accelerator_type out, or set "
            "draft.placement to sidecar"
        )
