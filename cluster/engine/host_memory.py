"""Sizes KV caches in the memory of a host, which other programs use as well. Imports no torch.

A cache has room for one sequence of the model's maximum length and for an ordinary one in each other place, because
`max_num_seqs` sequences of the maximum length would seldom exist at once. Its pages are allocated when they are first
touched.
"""

from __future__ import annotations

import logging
from pathlib import Path

from cluster.config.workers import WorkerConfig

logger = logging.getLogger(__name__)

_ORDINARY_TOKENS = 1024  # of a prompt and its answer
_CACHE_SHARE = 0.5  # of the available memory; the rest is for models that load later, and for other programs

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def host_cache_bytes(worker: WorkerConfig, max_model_len: int, bytes_per_token: int) -> int:
    """Returns the bytes that the KV cache of `worker` needs on a host, or its share of the host's memory if less."""
    needed = (max_model_len + worker.max_num_seqs * min(_ORDINARY_TOKENS, max_model_len)) * bytes_per_token
    return min(needed, int(_CACHE_SHARE * worker.memory_utilization * available_bytes()))


def available_bytes() -> int:
    """Returns the memory in bytes that programs can still get: of the host, or of this container if that is less."""
    lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    available = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    try:
        limit, used = ((_CGROUP / f"memory.{name}").read_text("ascii").strip() for name in ("max", "current"))
    except OSError:
        return available  # no cgroup of its own
    return available if limit == "max" else min(available, max(0, int(limit) - int(used)))


def usable_length(worker: WorkerConfig, max_model_len: int, num_blocks: int, bytes_per_token: int) -> int:
    """Returns the maximum tokens of a target's sequence, at most `max_model_len`, that its KV cache holds.

    Logs a warning with the remedy if the cache holds fewer than `max_model_len`.
    """
    num_tokens = num_blocks * worker.block_size
    if num_tokens < max_model_len:
        needed = -(-max_model_len // worker.block_size) * worker.block_size * bytes_per_token
        logger.warning(
            "the KV cache holds %d of the %d tokens that a sequence of %s may have, so longer requests are refused: "
            "set target.kv_cache_bytes to %d to serve them",
            *(num_tokens, max_model_len, worker.model, needed),
        )
    return min(max_model_len, num_tokens)
