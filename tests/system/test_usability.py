"""Tests of the output for a person who starts a cluster, and of what is left when it is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from cluster.engine.cpu_kernels import has_kernels
from services.launch.local import free_ports
from tests.waiting import WAIT_S, eventually


@contextmanager
def served(folder: Path, *arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """`outrider serve` once it is ready, and its log."""
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.cli", "serve", *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(folder)} | environment,
        )
    try:
        assert eventually(lambda: "Metrics:" in log.read_text() or process.poll() is not None, timeout_s=WAIT_S)
        assert process.poll() is None, log.read_text()
        yield process, log
    finally:
        process.terminate()
        process.wait(WAIT_S)


def assert_no_warning(log: Path) -> None:
    """Accepts the warning that the kernels do not run, where they do not."""
    lines = log.read_text().splitlines()
    found = [line for line in lines if re.search(r"WARN|ERROR|Traceback|Failed|deprecat", line)]
    assert [line for line in found if has_kernels() or "PyTorch's operators compute" not in line] == [], lines


def pids_of(folder: Path) -> list[int]:
    """Returns the process IDs of the programs whose TMPDIR is `folder`, and of their children."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"TMPDIR={folder}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("placement", "programs"), [("pool", ["router", "target", "draft"]), ("in-process", ["router", "target"])]
)
def test_a_normal_start_warns_of_nothing_says_where_all_is_and_leaves_nothing_running(
    placement: str, programs: list[str], tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    with served(tmp_path, OUTRIDER_ROUTER__PORT=str(port), OUTRIDER_DRAFT__PLACEMENT=placement) as (process, log):
        assert f"ready at http://127.0.0.1:{port} " in log.read_text()
        assert httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).json()["status"] == "ok"
        assert len(pids_of(tmp_path)) == 1 + len(programs)
        urls = re.findall(r"^  (http://\S+/metrics) \((.*)\)$", log.read_text(), re.MULTILINE)
        assert [name for _, name in urls] == programs
        processes = re.findall(r"^  (\w+): \S+, process (\d+)$", log.read_text(), re.MULTILINE)
        assert [name for name, _ in processes] == programs
        assert {int(pid) for _, pid in processes} < set(pids_of(tmp_path))
        for url, _ in urls:
            assert "# HELP" in httpx.get(url, trust_env=False).text
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0
        assert pids_of(tmp_path) == []
    assert_no_warning(log)
    assert list(tmp_path.glob("outrider-*")) == []


def test_without_the_kernels_a_pair_answers_and_the_log_says_why(tmp_path: Path) -> None:
    with served(tmp_path, "--port", "0", OUTRIDER_CPU_ISA="none", ONEDNN_MAX_CPU_ISA="AVX2") as (_, log):
        url = re.search(r"ready at (\S+) ", log.read_text())
        assert url is not None
        body = {"prompt": "def main(", "max_tokens": 20, "temperature": 0}
        httpx.post(f"{url[1]}/v1/completions", json=body, trust_env=False).raise_for_status()
    assert "PyTorch's operators compute on this CPU" in log.read_text()


def test_quantized_models_warn_of_nothing_either(tmp_path: Path) -> None:
    arguments = ["--router.port", "0", "--target.quantization", "int8", "--draft.drafter", "self-int4"]
    with served(tmp_path, *arguments) as (_, log):
        pass
    assert_no_warning(log)


def test_with_the_log_level_error_nothing_is_logged(tmp_path: Path) -> None:
    with served(tmp_path, "--port", "0", "--log-level", "error") as (_, log):
        pass
    assert not re.search(r"INFO|WARN", log.read_text())


def test_one_request_is_found_in_the_logs_of_router_and_target(tmp_path: Path) -> None:
    options = ["--port", "0", "--log-format", "json", "--log-level", "debug", "--draft-replicas", "2"]
    with served(tmp_path, *options, "--target.engine", "simulated", "--draft.drafter", "simulated") as (_, log):
        url = re.search(r"ready at (\S+) ", log.read_text())
        assert url is not None
        for number in range(2):
            headers = {"x-request-id": f"mine-{number}"}
            body = {"prompt": ["a secret", "another"], "max_tokens": 3, "seed": number}
            httpx.post(f"{url[1]}/v1/completions", json=body, headers=headers, trust_env=False).raise_for_status()
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    assert {line["program"] for line in lines} == {"serve", "router", "target", "draft 0", "draft 1"}
    (asked,) = (line for line in lines if line.get("client_request_id") == "mine-1")
    assert (asked["logger"], asked["seed"], asked["generated_tokens"]) == ("outrider.access", 1, 6)
    calls = [line for line in lines if line.get("request_id", "").startswith(f"{asked['id']}#")]
    assert sorted(line["message"] for line in calls) == ["call begins", "call begins", "call ends", "call ends"]
    assert {line["program"] for line in calls} == {"target"}
    assert sorted(line["choice"] for line in calls if "choice" in line) == [0, 1]
    assert "secret" not in log.read_text()


def test_a_killed_launcher_leaves_no_process_and_the_next_one_no_folder(tmp_path: Path) -> None:
    with served(tmp_path, "--port", "0", "--draft.placement", "pool") as (process, _):
        assert len(pids_of(tmp_path)) == 4
        os.kill(process.pid, signal.SIGKILL)
        process.wait(WAIT_S)
        assert eventually(lambda: pids_of(tmp_path) == [], timeout_s=WAIT_S)
    assert len(list(tmp_path.glob("outrider-serve-*"))) == 1
    with served(tmp_path, "--port", "0", "--draft.placement", "pool"):
        assert len(list(tmp_path.glob("outrider-serve-*"))) == 1  # its own
    assert list(tmp_path.glob("outrider-*")) == []
