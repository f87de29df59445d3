"""A cluster as its users and operators meet it: real clients, cancelled requests, dead workers, start and end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest

from bench.workload import read_counters
from cluster.model_folder import resolve_model_folder
from cluster.tokenization import Tokenizer
from services.launch.local import LocalCluster
from tests.system.client import Case, complete_all
from tests.system.conftest import READY_TIMEOUT_SECONDS, cluster_config

PROMPT = "def main("


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def assert_nothing_in_use(cluster: LocalCluster) -> None:
    for worker in (*cluster.targets, *cluster.drafts):
        assert eventually(lambda url=worker.metrics_url: read_counters(url)["outrider_kv_blocks_used"] == 0), (
            worker.name
        )
    for draft in cluster.drafts:
        assert eventually(lambda url=draft.metrics_url: read_counters(url)["outrider_draft_sequences"] == 0)


def test_openai_client_gets_the_same_text_streamed_and_whole(cluster: LocalCluster) -> None:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        whole = client.completions.create(model=model, prompt=PROMPT, max_tokens=40, seed=11, temperature=0.8)
        stream = client.completions.create(
            model=model,
            prompt=PROMPT,
            max_tokens=40,
            seed=11,
            temperature=0.8,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert whole.usage is not None
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens <= 40


def test_every_draft_is_accepted_when_the_draft_is_the_target(cluster: LocalCluster) -> None:
    """The greedy path of a round, all accepted and the bonus token on top, shown on counters."""
    with LocalCluster(cluster_config("draft.model=outrider-target-12m")) as twin:
        twin.wait_ready(READY_TIMEOUT_SECONDS)
        cases = [Case((400, 20, 7, seed), seed, 41, {"temperature": 1.0, "ignore_eos": True}) for seed in range(8)]
        assert complete_all(twin.url, cases, concurrency=2) == complete_all(
            cluster.url, cases, num_speculative_tokens=0
        )
        counters = read_counters(f"{twin.url}/metrics")
    accepted = counters["vllm:spec_decode_num_accepted_tokens_total"]
    drafted = counters["vllm:spec_decode_num_draft_tokens_total"]
    assert drafted > 8 * 41 / 2
    assert accepted >= 0.99 * drafted


def test_blocks_return_after_completion_and_cancellation(cluster: LocalCluster) -> None:
    complete_all(cluster.url, [Case((5, 6, 7), seed, 20) for seed in range(16)])
    body = {"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        for num_lines in (0, 1, 5):
            with client.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                for _ in range(num_lines):
                    next(lines)
    with pytest.raises(httpx.ReadTimeout):  # a client that leaves before the answer
        httpx.post(f"{cluster.url}/v1/completions", json={**body, "stream": False}, timeout=0.5)
    assert_nothing_in_use(cluster)


def test_answers_survive_dead_drafts_and_a_dead_target_comes_back(cluster: LocalCluster) -> None:
    """Last in this file: it leaves the session's cluster with new processes."""
    case = Case((300, 301, 302), 5, 60, {"temperature": 0.7, "ignore_eos": True})
    (expected,) = complete_all(cluster.url, [case])
    os.kill(cluster.drafts[0].pid, signal.SIGKILL)
    (without_draft,) = complete_all(cluster.url, [case])
    assert without_draft == expected
    os.kill(cluster.targets[0].pid, signal.SIGKILL)
    cluster.wait_ready(READY_TIMEOUT_SECONDS)
    cluster.watch()
    assert eventually(lambda: cluster.watch() is None and cluster.is_ready(), READY_TIMEOUT_SECONDS)
    (again,) = complete_all(cluster.url, [case])
    assert again == expected


def run_serve(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "services.cli", "serve", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def children_of(pid: int) -> list[int]:
    children = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            children.append(int(status.parent.name))
    return children


def test_serve_announces_itself_and_leaves_nothing_running() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve = run_serve("--port", str(port))
    try:
        assert serve.stdout is not None
        while (line := serve.stdout.readline()) and "ready" not in line:
            pass
        assert f"http://127.0.0.1:{port}" in line
        assert httpx.get(f"http://127.0.0.1:{port}/health").json()["status"] == "ok"
        children = children_of(serve.pid)
        assert len(children) == 3
    finally:
        serve.send_signal(signal.SIGINT)
        _, errors = serve.communicate(timeout=30)
    assert serve.returncode == 0, errors
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


def test_serve_refuses_a_pair_with_different_tokenizers(tmp_path: Path) -> None:
    bundled = resolve_model_folder("outrider-draft-2m")
    draft = shutil.copytree(bundled, tmp_path / "draft")
    definition = json.loads((draft / "tokenizer.json").read_text())
    definition["model"]["merges"].pop()
    (draft / "tokenizer.json").write_text(json.dumps(definition))
    serve = run_serve("--port", "0", "--draft", str(draft))
    _, errors = serve.communicate(timeout=60)
    assert serve.returncode == 2
    last_line = errors.splitlines()[-1]
    assert Tokenizer(draft).fingerprint() in last_line
    assert Tokenizer(bundled).fingerprint() in last_line


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--target", "/no/such/folder"], "there is no model '/no/such/folder'"),
        (["--set", "router.prot=1"], "did you mean 'port'?"),
        (["--num-speculative-tokens", "-1"], "speculation.num_speculative_tokens"),
        (["--port", "{taken}"], "choose another with --port"),
    ],
)
def test_serve_refuses_what_cannot_work_with_one_line(arguments: list[str], complaint: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        serve = run_serve("--port", "0", *(argument.format(taken=port) for argument in arguments))
        _, errors = serve.communicate(timeout=60)
    assert serve.returncode == 2
    assert complaint in errors.splitlines()[-1]
    assert "Traceback" not in errors
