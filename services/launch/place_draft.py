"""Where the local launcher has drafts made when nobody says: by what is faster on the machine at hand."""

from __future__ import annotations

import os

from cluster.config import Config
from services.launch.cores import divide_cores

# Those that were measured: models of the PyTorch engine, and what is hardly any work.
_DRAFTERS = ("model", "self-int4", "layer-skip", "ngram")


def place_draft(config: Config) -> tuple[Config, str | None]:
    """`config` with `draft.placement` decided, and why it is what it is; None: there was nothing to decide."""
    if config.draft.placement != "auto" or not config.has_drafter or config.draft.replicas == 0:
        return config, None
    why = why_apart(config)
    placement = "in-process" if why is None else "pool"
    placed = config.model_copy(update={"draft": config.draft.model_copy(update={"placement": placement})})
    return placed, why or "one target and its draft share the few cores of this machine"


def why_apart(config: Config) -> str | None:
    """Why target and draft should be processes of their own; None: one process is faster (`bench.placements`)."""
    target, draft = config.target, config.draft
    if target.engine != "torch":
        return f"target.engine is {target.engine}"
    if draft.drafter not in _DRAFTERS:
        return f"draft.drafter is {draft.drafter}"
    if (target.replicas, draft.replicas) != (1, 1):
        return f"there are {target.replicas} targets and {draft.replicas} draft workers"
    if "cuda" in (target.device, draft.device) or _has_gpu():
        return "a GPU may be used"  # not measured
    if target.cpus is not None or draft.cpus is not None or target.threads is not None or draft.threads is not None:
        return "cores or threads are set"
    if config.simulation.needs_proxy:
        return "the simulation has a network"
    if not divide_cores(sorted(os.sched_getaffinity(0)), 1, 1).drafts_share:
        return "there are cores for both"
    return None


def _has_gpu() -> bool:
    """Without PyTorch, which the launcher does not import."""
    return os.path.exists("/dev/nvidiactl")
