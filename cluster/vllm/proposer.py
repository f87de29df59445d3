"""The proposer of vLLM's runner where drafts come from outside: it proposes nothing."""

from __future__ import annotations

from typing import Any


class NoProposer:
    """vLLM's `custom_class`: its scheduler sets the drafts (`cluster.vllm.scheduler`)."""

    def __init__(self, vllm_config: Any) -> None:
        """`vllm_config` is ignored."""

    def load_model(self, target_model: Any) -> None:
        """There is none; the CPU runner calls this all the same."""

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        """An empty list for every request."""
        return [[] for _ in sampled_token_ids]
