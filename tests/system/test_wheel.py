"""The wheel: what it holds, and that a cluster runs from it where there is no checkout."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import pytest

from cluster.engine.cpu_kernels import LANES_VARIABLE
from deploy.release import COMPILERS, build
from services.version import commit
from tests.soak import IS_SOAK
from tests.system.arm import QEMU, python_for_arm
from tests.waiting import WAIT_S

ROOT = Path(__file__).parents[2]
SUFFIXES = {"css", "html", "jinja", "js", "json", "md", "proto", "py", "pyi", "safetensors", "so", "svg", "txt"}
# Without variables that would let programs find the checkout.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in {"VIRTUAL_ENV", "PYTHONPATH"}}


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the sdist and the wheels that are built from it, in `make test` only this processor's.

    That one has kernels compiled with -O1, because a full optimization, as at installation, takes half a minute.
    """
    machine = platform.machine()
    compilers = {name: compiler for name, compiler in COMPILERS.items() if shutil.which(compiler) is not None}
    if machine not in compilers:
        pytest.skip("a wheel needs a C compiler")
    folder = tmp_path_factory.mktemp("dist")
    if IS_SOAK:
        build(folder, compilers)
        return folder
    compiler = tmp_path_factory.mktemp("compiler") / "cc"
    compiler.write_text(f'#!/bin/sh\nexec {COMPILERS[machine]} "$@" -O1\n', encoding="utf-8")
    compiler.chmod(0o755)
    build(folder, {machine: str(compiler)})
    return folder


def of_machine(dist: Path, machine: str) -> Path:
    [wheel] = dist.glob(f"*_{machine}.whl")
    return wheel


@pytest.fixture(scope="session")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel, and this environment's packages: PyTorch takes long to install."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(of_machine(dist, platform.machine()))], check=True, env=ENVIRONMENT)
    [packages] = folder.glob("lib/python*/site-packages")
    # Paths of a .pth file come last, and .pth files there have no effect: an editable install of Outrider is not found.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    return folder


def test_the_wheel_holds_the_product_and_nothing_else(dist: Path) -> None:
    wheel = of_machine(dist, platform.machine())
    assert re.search(r"-cp311-abi3-manylinux_2_\d+_", wheel.name)
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    installed = {name for name in names if ".dist-info/" not in name}
    assert {name.partition("/")[0] for name in installed} == {"cluster", "services", "protos"}
    assert {Path(name).suffix[1:] for name in installed} == SUFFIXES
    tracked = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "cluster", "services", "protos"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert {name for name in tracked if not name.endswith((".c", ".h"))} <= names
    assert {"cluster/engine/_kernels.abi3.so", "cluster/speculation/_sampling.abi3.so", "services/commit.txt"} <= names
    assert not [name for name in names if re.search(r"(^|/)(tests?|bench|results|docs)/|(^|/)test_", name)]


def test_kernels_keep_to_pythons_stable_abi(dist: Path) -> None:
    command = [sys.executable, "-m", "abi3audit", "--strict", *map(str, dist.glob("*.whl"))]
    assert subprocess.run(command, check=False).returncode == 0


def test_the_sdist_holds_what_the_wheel_is_built_from(dist: Path) -> None:
    [sdist] = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        tops = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    assert {"cluster", "services", "protos", "pyproject.toml", "setup.py", "LICENSE", "README.md"} <= tops
    assert not tops & {"tests", "bench", "docs", ".venv"}


def test_a_release_build_fails_without_a_compiler(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "setup.py",
        "-q",
        "build_ext",
        "--build-lib",
        str(tmp_path),
        "--build-temp",
        str(tmp_path),
    ]
    without = os.environ | {"CC": "false"}
    assert subprocess.run(command, cwd=ROOT, env=without, check=False, capture_output=True).returncode == 0
    release = without | {"OUTRIDER_RELEASE": "1"}
    assert subprocess.run(command, cwd=ROOT, env=release, check=False, capture_output=True).returncode != 0
    assert not list(tmp_path.rglob("*.so"))


@pytest.fixture
def empty_folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert not list(tmp_path.iterdir())


def test_a_cluster_runs_from_the_wheel(installed: Path, empty_folder: Path) -> None:
    def output_of(*command: str) -> str:
        return subprocess.run(
            [str(installed / "bin" / command[0]), *command[1:]],
            cwd=empty_folder,
            env=ENVIRONMENT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()

    show = "import cluster, protos, services; print(cluster.__file__, protos.__file__, services.__file__, sep='\\n')"
    assert all(Path(file).is_relative_to(installed) for file in output_of("python", "-c", show).splitlines())
    shown = output_of("outrider", "--version")
    assert shown.startswith("outrider 0.")
    assert f"commit {commit() or 'unknown'}, wire " in shown
    assert shown.endswith("kernels built: engine, sampling)")

    with served([str(installed / "bin" / "outrider"), "serve", "--port", "0"], empty_folder, ENVIRONMENT) as url:
        fields = {"prompt": "def main(", "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=fields, timeout=WAIT_S).json()
        assert answer["usage"]["completion_tokens"] == 8
        assert "page/main.js" in httpx.get(f"{url}/").text
        assert httpx.get(f"{url}/page/main.js").status_code == 200


@contextlib.contextmanager
def served(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """Yields the URL of a cluster that `command` starts in `folder`."""
    serve = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert serve.stdout is not None
        yield next(found.group(1) for line in serve.stdout if (found := re.search(r"ready at (http://\S+)", line)))
        serve.send_signal(signal.SIGTERM)
        assert serve.wait(WAIT_S) == 0
    finally:
        serve.kill()
        serve.wait()


@pytest.mark.skipif(
    not IS_SOAK or None in map(shutil.which, (QEMU, COMPILERS["aarch64"])),
    reason="make soak, with qemu-user-static and gcc-aarch64-linux-gnu",
)
def test_tokens_on_arm_are_those_on_this_processor(dist: Path, installed: Path, tmp_path: Path) -> None:
    python = python_for_arm(tmp_path / "arm", of_machine(dist, "aarch64"))
    machine = subprocess.run(
        [python, "-c", "import platform; print(platform.machine())"], capture_output=True, text=True
    )
    assert machine.stdout == "aarch64\n"
    environment = {name: value for name, value in ENVIRONMENT.items() if name != LANES_VARIABLE}  # ARM has 4 only
    environment["OUTRIDER_CPU_ISA"] = "portable"
    serve = ["-m", "services.cli", "serve", "--port", "0"]
    with (
        served([str(python), *serve], tmp_path, environment) as arm,
        served([str(installed / "bin" / "python"), *serve], tmp_path, environment) as here,
    ):
        for seed, prompt in enumerate(("def main(", "import os\n\nclass Router:", "# The quick brown fox")):
            for temperature in (0, 1):
                fields = {"prompt": prompt, "max_tokens": 48, "temperature": temperature, "seed": seed, "logprobs": 1}
                answers = [httpx.post(f"{url}/v1/completions", json=fields, timeout=600).json() for url in (arm, here)]
                assert answers[0]["choices"] == answers[1]["choices"]
