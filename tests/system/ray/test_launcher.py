"""`outrider serve --launcher ray`: comes up, answers as the local launcher does, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from openai import OpenAI

from services.launch.local import LocalCluster, free_ports
from tests.system.cases import sampled_cases
from tests.system.client import complete_all
from tests.system.conftest import READY_TIMEOUT_SECONDS, cluster_config
from tests.waiting import eventually

CONFIG = Path(__file__).parents[3] / "configs" / "ray-local.yaml"
FLOAT32 = ("--dtype", "float32", "--set", "target.threads=1")
NUM_CASES = 20
END_SECONDS = 60


class Launcher:
    def __init__(self, process: subprocess.Popen[str], log: Path, url: str) -> None:
        self.process = process
        self.url = url
        self._log = log

    @property
    def said(self) -> str:
        return self._log.read_text()

    def wait_ready(self) -> None:
        assert eventually(self._has_begun, READY_TIMEOUT_SECONDS), self.said
        assert self.process.poll() is None, self.said

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def _has_begun(self) -> bool:
        return "Outrider is ready at" in self.said or self.process.poll() is not None


def environment(folder: Path) -> dict[str, str]:
    """Temporary files are in `folder`, Ray's too, so that no other Ray of this machine is found."""
    return os.environ | {"RAY_ADDRESS": "", "RAY_TMPDIR": str(folder), "TMPDIR": str(folder)}


@contextmanager
def launched(folder: Path, *arguments: str) -> Iterator[Launcher]:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "services.cli", "serve", "--launcher", "ray", "--config", str(CONFIG)]
    log = folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--port", str(port), *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(folder),
        )
    try:
        yield Launcher(process, log, f"http://127.0.0.1:{port}")
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


@pytest.fixture
def folder() -> Iterator[Path]:
    """For temporary files, whose path is short enough for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="or-") as name:
        yield Path(name)


def assert_nothing_left(launcher: Launcher, descendants: list[psutil.Process], folder: Path) -> None:
    assert eventually(lambda: not any(_is_alive(process) for process in descendants), END_SECONDS)
    assert list(folder.glob("*outrider*")) == []
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{launcher.url}/health/live")


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_it_answers_as_the_local_launcher_does_and_leaves_nothing_behind(folder: Path) -> None:
    cases = sampled_cases(NUM_CASES)
    with LocalCluster(cluster_config("target.threads=1")) as local:
        local.wait_ready(READY_TIMEOUT_SECONDS)
        expected = complete_all(local.url, cases)
    with launched(folder, *FLOAT32) as launcher:
        launcher.wait_ready()
        client = OpenAI(base_url=f"{launcher.url}/v1", api_key="none")
        model = client.models.list().data[0].id
        chunks = client.completions.create(model=model, prompt="def f(", max_tokens=8, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks)
        assert complete_all(launcher.url, cases) == expected
        descendants = launcher.descendants()
        launcher.process.send_signal(signal.SIGINT)
        assert launcher.process.wait(END_SECONDS) == 0, launcher.said
        assert_nothing_left(launcher, descendants, folder)


def test_what_cannot_start_is_told_in_a_line_and_leaves_nothing_behind(folder: Path) -> None:
    descendants: list[psutil.Process] = []
    with launched(folder, "--draft", "/nowhere") as launcher:
        while launcher.process.poll() is None:
            descendants = descendants + [one for one in launcher.descendants() if one not in descendants]
            time.sleep(0.2)
        assert launcher.process.returncode == 2
        (line,) = re.findall("^outrider serve: .*$", launcher.said, re.MULTILINE)
        assert "cannot start" in line
        assert "/nowhere" in line
        assert_nothing_left(launcher, descendants, folder)


def test_what_a_killed_launcher_leaves_is_ended_by_down(folder: Path) -> None:
    simulated = ("--set", "target.engine=simulated", "--set", "draft.drafter=simulated")
    with launched(folder, *simulated) as launcher:
        launcher.wait_ready()
        # Ray's own agents of a node notice only after a minute that it is gone.
        descendants = [one for one in launcher.descendants() if "Agent" not in "".join(one.cmdline())]
        launcher.process.kill()
        launcher.process.wait()
        subprocess.run(
            [sys.executable, "-m", "services.cli", "down"],
            check=True,
            env=environment(folder),
            timeout=END_SECONDS,
        )
        assert_nothing_left(launcher, descendants, folder)
