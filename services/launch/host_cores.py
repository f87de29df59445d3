"""Assigns the cores of a host for `draft.placement: host-cpu`: some stay with the targets, the drafts get others."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.config import Config
from cluster.errors import ConfigurationError
from services.launch.cores import CoreShares

# A draft's step is bound by reading its weights. A core of Sapphire Rapids reads 13 GB/s (`bench.engine`), 16 cores
# therefore two thirds of the 307 GB/s of a socket; the threads of more cores wait for memory and for each other.
MAX_DRAFT_CORES = 16
_SYSTEM = Path("/sys/devices/system")
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core: the logical CPUs on it that this process may use, and its NUMA node."""

    cpus: tuple[int, ...]
    node: int = 0


def share_host_cores(config: Config, cores: Sequence[Core], *, target_has_gpu: bool) -> CoreShares:
    """Returns the CPUs of targets and drafts. `draft.replicas` counts the drafts of all targets.

    Raises ConfigurationError when no core is left for a draft.
    """
    target, draft = config.target, config.draft
    if target.cpus is None and not target_has_gpu:
        raise ConfigurationError(
            "draft.placement host-cpu: the target computes on the CPU and takes all cores: set target.cpus to some "
            "of them, or draft.placement to sidecar or in-process, where the draft shares its cores"
        )
    drafts = _free_cores(config, cores) if draft.cpus is None else (draft.cpus,) * draft.replicas
    taken = {cpu for own in drafts for cpu in own}
    left = tuple(sorted(cpu for core in cores if not set(core.cpus) & taken for cpu in core.cpus))
    if not (target.cpus or left):
        raise ConfigurationError(
            "draft.placement host-cpu: draft.cpus leaves the target no core: leave it out, or list fewer"
        )
    return CoreShares((target.cpus or left,) * target.replicas, drafts)


def num_target_cores(config: Config) -> int:
    """Returns the number of physical cores that are kept for targets with GPUs, and for the router.

    A target keeps 2 + the number of its GPUs, vLLM's documented minimum ("CPU Resources for GPU Deployments"): for the
    engine core, which spins, for a process for each GPU, and for the process that talks to the router. With one GPU the
    PyTorch engine has as many busy threads: the step loop, the links to the draft workers, gRPC. The router keeps one.
    """
    return config.target.replicas * (2 + config.target.tensor_parallel_size) + 1


def _free_cores(config: Config, cores: Sequence[Core]) -> tuple[tuple[int, ...], ...]:
    """Returns the CPUs of each draft. Raises ConfigurationError if there are too few."""
    target, draft = config.target, config.draft
    free = [core for core in cores if not set(core.cpus) & set(target.cpus or ())]
    num_kept = num_target_cores(config) if target.cpus is None else 0
    num_free = max(0, len(free) - num_kept)
    num_cores = min(draft.threads or MAX_DRAFT_CORES, num_free // draft.replicas)
    chosen = choose_cores(free, draft.replicas, num_cores) if num_cores else ()
    if min(map(len, chosen), default=0) < (draft.threads or 1):
        wanted = "a core" if draft.threads is None else f"draft.threads {draft.threads} cores of one NUMA node"
        kept = f"{target.replicas} x (2 + GPUs) for targets and 1 for the router are kept, {num_kept} in all"
        raise ConfigurationError(
            f"draft.placement host-cpu: {num_free} of {len(cores)} cores are free, and each of {draft.replicas} draft "
            f"workers needs {wanted} ({kept if target.cpus is None else 'target.cpus has the others'}): allow more "
            "cores, set target.cpus or draft.threads to fewer, or set draft.placement to sidecar"
        )
    return chosen


def choose_cores(free: Sequence[Core], num_drafts: int, num_cores: int) -> tuple[tuple[int, ...], ...]:
    """Returns the CPUs of each draft, one for each of its cores.

    The cores are the last free ones of the NUMA node that has the most free cores. A draft gets fewer than `num_cores`
    if no node has enough left: its weights lie on the node that loads them, and reading them from
    another node would cost more than further cores save.
    """
    nodes: defaultdict[int, list[Core]] = defaultdict(list)
    for core in sorted(free, key=lambda core: core.cpus):
        nodes[core.node].append(core)
    chosen = []
    for _ in range(num_drafts):
        left = nodes[max(nodes, key=lambda node: (len(nodes[node]), node))]
        own = left[-num_cores:]
        del left[-num_cores:]
        chosen.append(tuple(core.cpus[0] for core in own))
    return tuple(chosen)


def read_cores(system: Path = _SYSTEM) -> tuple[Core, ...]:
    """Returns the physical cores that this process may use, by its CPU affinity and the CPU limit of its cgroup."""
    nodes = {
        cpu: int(folder.name.removeprefix("node"))
        for folder in system.glob("node/node[0-9]*")
        for cpu in parse_cpu_list((folder / "cpulist").read_text(encoding="ascii"))
    }
    allowed = os.sched_getaffinity(0)
    cores: dict[tuple[int, ...], Core] = {}
    for cpu in sorted(allowed):
        try:
            text = (system / f"cpu/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
            siblings = tuple(sorted(allowed & set(parse_cpu_list(text))))
        except OSError:  # some sandboxes have no topology
            siblings = (cpu,)
        cores[siblings] = Core(siblings, nodes.get(cpu, 0))
    return tuple(cores.values())[: read_quota()]


def read_quota(own_cgroup: Path = _OWN_CGROUP, cgroups: Path = _CGROUPS) -> int | None:
    """Returns the CPU limit of this process's cgroup (v2), in whole CPUs; None if it has no limit."""
    try:
        path = own_cgroup.read_text(encoding="utf-8").strip().rpartition("::")[2]
        quota, period = (cgroups / path.lstrip("/") / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):  # the root group has no file, and version 1 has other ones
        return None
    return None if quota == "max" else max(1, int(quota) // int(period))


def parse_cpu_list(text: str) -> Iterator[int]:
    """Yields the CPUs of the kernel's notation for lists, such as `0-3,8`."""
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:  # a node without CPUs has an empty list
            yield from range(int(first), int(last or first) + 1)
