"""Renders the Helm chart without a `helm` program: for manifests that are committed, and for the tests."""

from __future__ import annotations

import re
from typing import Any

import helm_python

from deploy.helm.values import CHART


def render(values: dict[str, Any], name: str = "demo") -> list[str]:
    """The objects, one text each, in the order of their templates. Raises HelmError naming a wrong value."""
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        manifests = chart.render(values, name=name, namespace="serving")
    texts = [_without_blank_lines(text) for path in sorted(manifests) for text in _documents(manifests[path])]
    return [text for text in texts if re.search(r"^kind: ", text, re.MULTILINE)]


def join(objects: list[str]) -> str:
    return "---\n".join(objects)


def _documents(text: str) -> list[str]:
    return re.split(r"^---\s*$", text, flags=re.MULTILINE)


def _without_blank_lines(text: str) -> str:
    """Those that a template's own lines leave behind."""
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines() if line.strip())
