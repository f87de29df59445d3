"""Plugin for `vllm serve`: coupled sampling and draft workers, without our target worker and router."""

from __future__ import annotations


def is_asked_for(additional_config: object) -> bool:
    """Returns True if `additional_config` enables the plugin: a section `outrider` with `draft_addresses`."""
    section = additional_config.get("outrider") if isinstance(additional_config, dict) else None
    return isinstance(section, dict) and "draft_addresses" in section
