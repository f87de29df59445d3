"""`core.CoordinatedScheduler` for vLLM's V2 runner, which is scheduled asynchronously."""

from __future__ import annotations

from cluster.targets.vllm.core import CoordinatedScheduler
from cluster.vllm.async_scheduler import AsyncRoundScheduler


class AsyncCoordinatedScheduler(CoordinatedScheduler, AsyncRoundScheduler):
    """Named to vLLM as its `scheduler_cls`."""
