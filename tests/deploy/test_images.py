"""Tests of the requirements that images are built with, and of their last stages."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"


def pinned() -> dict[str, str]:
    lines = (DOCKER / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


@pytest.mark.parametrize("extra", [None, "ray", "tracing"])
def test_what_we_need_is_pinned_within_our_own_bounds(extra: str | None) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    versions = pinned()
    for text in project["dependencies"] if extra is None else project["optional-dependencies"][extra]:
        requirement = Requirement(text)
        assert versions[canonicalize_name(requirement.name)] in requirement.specifier, "run `make constraints`"


def test_the_image_is_built_with_them() -> None:
    assert "--constraint constraints.txt" in (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    assert "!deploy/docker/constraints.txt" in (ROOT / ".dockerignore").read_text(encoding="utf-8").split()


@pytest.mark.parametrize("dockerfile", ["Dockerfile", "vllm-cuda.Dockerfile"])
def test_the_last_stage_has_no_compiler_and_no_root(dockerfile: str) -> None:
    """Checks the text only. `try_image.sh` builds and runs the images."""
    last = (DOCKER / dockerfile).read_text(encoding="utf-8").rpartition("\nFROM ")[2]
    assert "gcc" not in last
    users = [line.split()[1] for line in last.splitlines() if line.startswith("USER ")]
    assert users[-1] == "1000:1000"
    assert "HEALTHCHECK" in last
