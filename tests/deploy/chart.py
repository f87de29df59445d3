"""Renderings of the chart for tests: sets of values, and helpers that find objects in the output."""

from __future__ import annotations

from typing import Any

import yaml

from deploy.helm.render import render as render_texts
from tests.deploy.golden import CASES, read_values

# Not among the golden files: their text is in files of its own.
DASHBOARDS_AND_ALERTS = {
    "prometheusRules": {"enabled": True, "labels": {"release": "prometheus"}},
    "grafana": {"dashboards": {"enabled": True, "annotations": {"grafana_folder": "Outrider"}}},
}


def without_keys(values: dict[str, Any]) -> dict[str, Any]:
    """Values with which routers may be without keys: the chart refuses them otherwise."""
    return values | {"router": {"open": True} | values.get("router", {})}


_INLINE: dict[str, dict[str, Any]] = {
    "no speculation": {"config": {"speculation": {"num_speculative_tokens": 0}}},
    "the engine drafts": {
        "config": {
            "target": {"engine": "vllm"},
            "draft": {"drafter": "engine", "speculative_config": {"method": "ngram"}},
            "speculation": {"acceptance": "coupled"},
        }
    },
    "dashboards and alerts": DASHBOARDS_AND_ALERTS,
    "dashboards and alerts for Ray": DASHBOARDS_AND_ALERTS | {"mode": "ray"},
    "no draft workers": {"config": {"draft": {"replicas": 0}}},
    "drafts in process": {"config": {"draft": {"placement": "in-process"}}},
}
VALUES: dict[str, dict[str, Any]] = {
    **{case: read_values(case) for case in CASES},
    **{case: without_keys(values) for case, values in _INLINE.items()},
}


def render(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [yaml.safe_load(text) for text in render_texts(without_keys(values))]


def find(documents: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = [one for one in documents if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def pods(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The templates of pods in an object."""
    spec = document.get("spec", {})
    match document["kind"]:
        case "Deployment" | "StatefulSet":
            return [spec["template"]]
        case "RayService":
            cluster = spec["rayClusterConfig"]
            return [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
        case "LeaderWorkerSet":
            return [spec["leaderWorkerTemplate"][which] for which in ("leaderTemplate", "workerTemplate")]
    return []
