"""Tests of the requirements that images are built with, and of their last stages."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.docker.constraints import WITHOUT_HASH

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"


def pinned() -> dict[str, str]:
    return {name: rest.split()[0] for name, rest in lines().items()}


def lines() -> dict[str, str]:
    """The version, hashes and mark of each package by name."""
    text = (DOCKER / "constraints.txt").read_text(encoding="utf-8")
    return dict(line.split("==") for line in text.splitlines() if not line.startswith("#"))


@pytest.mark.parametrize("extra", [None, "ray", "tracing"])
def test_what_we_need_is_pinned_within_our_own_bounds(extra: str | None) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    versions = pinned()
    for text in project["dependencies"] if extra is None else project["optional-dependencies"][extra]:
        requirement = Requirement(text)
        assert versions[canonicalize_name(requirement.name)] in requirement.specifier, "run `make constraints`"


def test_every_package_but_torch_has_the_hashes_of_its_wheels() -> None:
    num_hashes = {name: len(re.findall(r" --hash=sha256:[0-9a-f]{64}\b", rest)) for name, rest in lines().items()}
    assert [name for name, number in num_hashes.items() if number == 0] == [WITHOUT_HASH]
    assert set(num_hashes.values()) == {0, 1, 2}  # one wheel for all machines, or one for each


@pytest.mark.parametrize("extras", ["", "ray", "tracing", "ray,tracing"])
def test_an_image_has_the_packages_of_its_extras(extras: str, tmp_path: Path) -> None:
    """Runs the line of the Dockerfile that chooses them."""
    text = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    (command,) = re.findall(r"&& (grep -E .*) > packages\.txt", text)
    run = subprocess.run(["sh", "-c", command], cwd=DOCKER, env={"EXTRAS": extras, "PATH": os.defpath}, stdout=-1)
    chosen = {line.split("==")[0] for line in run.stdout.decode().splitlines()}
    marks = {name: rest.partition("  # ")[2].split() for name, rest in lines().items()}
    wanted = {name for name, of in marks.items() if not of or set(of) & set(extras.split(","))}
    assert chosen == wanted - {WITHOUT_HASH}
    assert "numpy" in chosen
    assert ("ray" in chosen) == ("ray" in extras)
    assert "setuptools" not in chosen


def test_the_image_is_built_with_them() -> None:
    assert (DOCKER / "Dockerfile").read_text(encoding="utf-8").count("--require-hashes") == 2
    assert "!deploy/docker/constraints.txt" in (ROOT / ".dockerignore").read_text(encoding="utf-8").split()


@pytest.mark.parametrize("dockerfile", ["Dockerfile", "vllm-cuda.Dockerfile"])
def test_the_last_stage_has_no_compiler_and_no_root(dockerfile: str) -> None:
    """Checks the text only. `try_image.sh` builds and runs the images."""
    last = (DOCKER / dockerfile).read_text(encoding="utf-8").rpartition("\nFROM ")[2]
    assert "gcc" not in last
    users = [line.split()[1] for line in last.splitlines() if line.startswith("USER ")]
    assert users[-1] == "1000:1000"
    assert "HEALTHCHECK" in last
