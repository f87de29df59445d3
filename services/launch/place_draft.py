"""The local launcher's default placement of drafts: the faster one on this machine."""

from __future__ import annotations

import glob
import os

from cluster.config import V2_RUNNER, Config
from cluster.drafters.pairing import draft_vocabulary
from cluster.errors import ConfigurationError
from services.launch.cores import divide_cores
from services.launch.host_cores import num_target_cores, read_cores

# The measured cases: models of the PyTorch engine, and drafters that compute hardly anything.
_DRAFTERS = ("model", "self-int4", "ngram")
_MODELS = ("model", "parallel", "self-int4")  # drafters that compute on a GPU
_MIN_CORES = 4  # for the draft alone; with fewer it gains hardly anything over the core that it shares in a pool


def place_draft(config: Config) -> tuple[Config, str | None]:
    """Returns `config` with `draft.placement` decided, and the reason; None: nothing to decide."""
    if config.draft.placement != "auto" or not config.has_drafter or config.draft.replicas == 0:
        return config, None
    placement, why = "in-process", why_apart(config)
    if _shares_gpu(config):
        why = "the target and its draft share a GPU"
    elif why is not None:
        placement = "pool"
        if _can_have_cores_of_its_own(config):
            placement, why = "host-cpu", "the target has a GPU, the draft the CPU, and enough cores are free for it"
    return _placed(config, placement), why or "one target and its draft share the few cores of this machine"


def _placed(config: Config, placement: str) -> Config:
    return config.model_copy(update={"draft": config.draft.model_copy(update={"placement": placement})})


def _shares_gpu(config: Config) -> bool:
    """Returns True if the target's process can draft on the machine's only GPU, where a draft worker would take turns.

    Turns of two processes are long: a draft step of 0.5 ms took 3 to 60 ms on an H200.
    """
    target, draft = config.target, config.draft
    is_alone = (target.replicas, draft.replicas, target.tensor_parallel_size) == (1, 1, 1)
    if not is_alone or draft.device == "cpu" or not target_has_gpu(config) or _num_gpus() != 1:
        return False
    if target.engine == "torch":
        return draft.drafter in _MODELS
    has_v2_runner = os.environ.get(V2_RUNNER, "1") == "1" and config.needs_v1_runner is None
    return target.engine == "vllm" and has_v2_runner and draft.drafter == "model" and _fits_in_vllm(config)


def _fits_in_vllm(config: Config) -> bool:
    """Returns True if vLLM accepts the vocabularies of draft and target in one process."""
    try:
        draft_vocabulary(_placed(config, "in-process"))
    except ConfigurationError:
        return False  # a draft worker may accept this pair; if not, `check_models` reports the error
    return True


def _num_gpus() -> int:
    """Returns the number of NVIDIA GPUs that have a device file."""
    return len(glob.glob("/dev/nvidia[0-9]*"))


def target_has_gpu(config: Config) -> bool:
    """Returns True if the target computes on a GPU, as far as the launcher can determine."""
    device = config.target.device
    return device == "cuda" or (device == "auto" and _has_gpu())


def draft_has_gpu(config: Config) -> bool:
    """Returns True if the draft workers compute on a GPU, as far as the launcher can determine."""
    return config.draft.device == "cuda" or (config.draft.device == "auto" and _has_gpu())


def _can_have_cores_of_its_own(config: Config) -> bool:
    """Returns True if a draft with `draft.device: cpu` gets cores that its target, which has a GPU, does not use.

    In a pool such a draft would do the same work on the same machine, but without cores of its own, and on a small
    machine on a single core without run-ahead. Returns False if the draft might use the GPU: no measurement shows which
    placement is faster then.
    """
    target, draft = config.target, config.draft
    if draft.device != "cpu" or not target_has_gpu(config) or target.engine == "simulated" or draft.drafter == "vllm":
        return False
    if (target.replicas, draft.replicas) != (1, 1) or (target.cpus, draft.cpus, draft.threads) != (None, None, None):
        return False
    return len(read_cores()) - num_target_cores(config) >= _MIN_CORES


def why_apart(config: Config) -> str | None:
    """Returns the reason to run target and draft in separate processes; None if one is faster."""
    target, draft = config.target, config.draft
    if target.engine != "torch":
        return f"target.engine is {target.engine}"
    if draft.drafter not in _DRAFTERS:
        return f"draft.drafter is {draft.drafter}"
    if (target.replicas, draft.replicas) != (1, 1):
        return f"the cluster has {target.replicas} targets and {draft.replicas} draft workers"
    if "cuda" in (target.device, draft.device) or _has_gpu():
        return "a GPU may be used"  # not measured
    if target.cpus is not None or draft.cpus is not None or target.threads is not None or draft.threads is not None:
        return "cores or threads are set"
    if config.simulation.needs_proxy:
        return "the simulation has a network"
    if not divide_cores(sorted(os.sched_getaffinity(0)), 1, 1).drafts_share:
        return "the machine has cores for both"
    return None


def _has_gpu() -> bool:
    """Returns True if there is a GPU. Does not use PyTorch, which the launcher does not import."""
    return os.path.exists("/dev/nvidiactl")
