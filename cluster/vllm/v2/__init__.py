"""Our sampling and our drafts in vLLM itself, on its V2 model runner: `vllm serve` with a plugin, without our worker.

Experimental: tried with Triton's interpreter on a CPU, not on a GPU.
"""

from __future__ import annotations


def is_asked_for(additional_config: object) -> bool:
    """Returns whether the plugin is enabled. Our own target worker has a section of the same name."""
    section = additional_config.get("outrider") if isinstance(additional_config, dict) else None
    return isinstance(section, dict) and "draft_addresses" in section
