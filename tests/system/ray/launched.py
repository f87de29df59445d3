"""`outrider serve --launcher ray` as a process, and what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from services.launch.local import free_ports
from tests.system.conftest import READY_TIMEOUT_SECONDS
from tests.waiting import WAIT_S, eventually

CONFIG = Path(__file__).parents[3] / "configs" / "ray-local.yaml"
END_SECONDS = 120
SIMULATED = ("--set", "target.engine=simulated", "--set", "draft.drafter=simulated")


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


def assert_nothing_left(launcher: Launcher, descendants: list[psutil.Process], folder: Path) -> None:
    assert eventually(lambda: not any(_is_alive(process) for process in descendants), END_SECONDS)
    assert (left := list(folder.glob("*outrider*"))) == [], left
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{launcher.url}/health/live")


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end_and_check(launcher: Launcher, folder: Path) -> None:
    """As Ctrl-C does; nothing is left."""
    descendants = launcher.descendants()
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.process.wait(END_SECONDS) == 0, launcher.said
    assert_nothing_left(launcher, descendants, folder)


REQUEST = {"prompt": "def main(", "max_tokens": 48, "temperature": 0.7, "seed": 7, "ignore_eos": True}


def answer(launcher: Launcher, k: int) -> tuple[list[int], int]:
    """Its tokens, and how many of them were drafted."""
    body = REQUEST | {"num_speculative_tokens": k, "return_token_ids": True, "return_speculation_stats": True}
    response = httpx.post(f"{launcher.url}/v1/completions", json=body, timeout=WAIT_S)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice["token_ids"], choice["speculation"]["num_accepted_tokens"]
