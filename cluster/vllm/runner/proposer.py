"""A proposer for vLLM's runner that proposes nothing, because drafts come from outside."""

from __future__ import annotations

from typing import Any


class NoProposer:
    """Proposer for vLLM's method `custom_class`. Our scheduler sets the drafts (`cluster.vllm.core.scheduler`)."""

    def __init__(self, vllm_config: Any) -> None:
        """Ignores `vllm_config`."""

    def load_model(self, target_model: Any) -> None:
        """Does nothing: there is no model, but the CPU runner calls this anyway."""

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        """Returns an empty list for every request."""
        return [[] for _ in sampled_token_ids]
