"""Settings of earlier versions. They are accepted for one more version: a warning says what holds instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_KEYS: Mapping[str, str] = {
    "draft.layers": "the drafter layer-skip no longer exists",
    "draft.ngram_min": "ngram looks up runs of 1 to 8 tokens",
    "draft.ngram_max": "ngram looks up runs of 1 to 8 tokens",
    "draft.product_tiles": "tiles are those that are fast on an H100",
    "target.product_tiles": "tiles are those that are fast on an H100",
    "draft.reflection": "workers no longer offer gRPC reflection: give grpcurl the folder protos/",
    "target.reflection": "workers no longer offer gRPC reflection: give grpcurl the folder protos/",
    "speculation.run_ahead_branches": "it is 3, or 0 where draft and target share cores",
    "router.max_bodies_bytes": "it is 512 MiB",
    "router.max_connections_per_address": "it is half of router.max_connections",
    "router.traffic_log_max_bytes": "it is 1 GiB",
    "router.write_timeout_seconds": "it is 30 s",
    "router.page_question": "a chat model's page begins with a question",
    "tracing.sample_ratio": "set OTEL_TRACES_SAMPLER=parentbased_traceidratio and OTEL_TRACES_SAMPLER_ARG",
    "ray.router.num_gpus": "a router needs no GPU",
    "ray.router.accelerator_type": "a router needs no GPU: choose its nodes by ray.router.label_selector",
    "ray.scaling.interval_seconds": "it is 5 s",
    "ray.scaling.target_use": "it is 0.8",
    "ray.scaling.queued_tokens": "it is 4096",
    "placement.host_label": "it is ray.io/node-id",
    "placement.zone_label": "it is ray.io/availability-zone",
    "placement.region_label": "it is ray.io/availability-region",
    "placement.heartbeat_seconds": "it is 1 s",
    "placement.expiry_seconds": "it is 6 s",
    "placement.settling_seconds": "it is 6 s",
}
_VALUES: Mapping[tuple[str, str], tuple[str, str]] = {
    ("draft.drafter", "layer-skip"): ("ngram", "drafts of some of the target's layers never paid"),
    ("speculation.controller", "threshold"): ("goodput", "a rule on the acceptance rate was never faster"),
}

RETIRED = tuple(_KEYS)
"""The retired settings, as `section.key`."""


def replace_retired(tree: dict[str, Any]) -> Iterator[str]:
    """Takes retired settings out of the configuration `tree`, and yields a warning for each."""
    for key, now in _KEYS.items():
        section, name = _place_of(tree, key)
        if name in section:
            del section[name]
            yield f"{key} is ignored and will be refused by the next version: {now}"
    for (key, value), (substitute, reason) in _VALUES.items():
        section, name = _place_of(tree, key)
        if section.get(name) == value:
            section[name] = substitute
            yield f"{key} {value} is replaced by {substitute} and will be refused by the next version: {reason}"


def _place_of(tree: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """Returns the section of `tree` with the setting `key`, empty if there is none, and the setting's name there."""
    *sections, name = key.split(".")
    for section in sections:
        tree = tree.get(section) or {}
        if not isinstance(tree, dict):
            return {}, name
    return tree, name
