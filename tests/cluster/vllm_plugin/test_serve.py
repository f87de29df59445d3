"""`vllm serve` with the plugin and a draft worker of ours, called by an OpenAI client."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from bench.workload import read_counters
from cluster.model_folder import resolve_model_folder
from services.launch.local import free_ports
from tests.soak import length, only_in_soak
from tests.waiting import eventually, wait_until

from .environment import ROOT, environment

MODEL = "target"
K, MAX_K = 4, 6
PROMPTS = ("def main(", "import os\n\n\nclass Reader:\n")
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.0, "presence_penalty": 0.3, "logit_bias": {"30": 2.0}},
    {"temperature": 1.0, "extra_body": {"min_p": 0.05, "repetition_penalty": 1.1}},
)
_START_SECONDS = 600
_STOP_SECONDS = 30


class Program:
    """A process of the test's own, ended with it."""

    def __init__(self, arguments: list[str], folder: Path) -> None:
        command = [sys.executable, "-m", *arguments]
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment(folder), stdin=subprocess.DEVNULL)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Draft:
    """A draft worker that can be killed and started again at its address."""

    def __init__(self, folder: Path) -> None:
        port, metrics_port = free_ports(2)
        self.address = f"127.0.0.1:{port}"
        self.metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
        self._folder = folder
        self.start()

    def start(self) -> None:
        port = self.metrics_url.removesuffix("/metrics").rpartition(":")[2]
        settings = ("dtype=float32", f"listen={self.address}", f"metrics_port={port}", "threads=1")
        arguments = [argument for setting in settings for argument in ("--set", f"draft.{setting}")]
        self._program = Program(["services.cli", "draft", *arguments], self._folder)

    def kill(self) -> None:
        self._program.process.kill()
        self._program.process.wait()

    def stop(self) -> None:
        self._program.stop()


class Server:
    def __init__(self, folder: Path, draft_address: str, num_engines: int = 1) -> None:
        port, metrics_port = free_ports(2)
        # Rows are expensive in the interpreter, so an automatic k would soon be 0.
        speculation = {"controller": "fixed", "num_speculative_tokens": K, "max_speculative_tokens": MAX_K}
        speculation |= {"draft_timeout_ms": 10_000}
        settings = {"draft_addresses": [draft_address], "speculation": speculation, "metrics_port": metrics_port}
        ports = [port, *range(metrics_port, metrics_port + num_engines)]
        self.metrics_urls = [f"http://127.0.0.1:{number}/metrics" for number in ports]
        # vLLM closes a connection that is idle for 5 s, possibly while the next request is being sent on it.
        headers = {"Connection": "close"}
        url = f"http://127.0.0.1:{port}/v1"
        self.client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, default_headers=headers)
        self._program = Program(
            [
                *("vllm.entrypoints.cli.main", "serve", str(resolve_model_folder("outrider-target-12m"))),
                *("--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)),
                *("--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "16"),
                *("--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(64 * 2**20)),
                *("--data-parallel-size", str(num_engines)),
                *("--additional-config", json.dumps({"outrider": settings})),
            ],
            folder,
        )

    def is_ready(self) -> bool:
        assert self._program.process.poll() is None, "vllm serve has ended; why is on stderr"
        try:
            return bool(self.client.models.list().data)
        except openai.APIConnectionError:
            return False

    def answer(self, prompt: str, seed: int = 5, k: object = None, **fields: Any) -> list[str]:
        """The texts of the choices. `k`: what the request asks for."""
        if k is not None:
            fields["extra_body"] = {**fields.get("extra_body", {}), "vllm_xargs": {"num_speculative_tokens": k}}
        arguments: dict[str, Any] = {"model": MODEL, "prompt": prompt, "seed": seed, "max_tokens": 24, **fields}
        return [choice.text for choice in self.client.completions.create(**arguments).choices]

    def answers(self, **fields: Any) -> list[list[str]]:
        """To every prompt with every kind of sampling, all at once."""
        asked = [(prompt, sampling) for prompt in PROMPTS[: length(1, 2)] for sampling in SAMPLING]
        with ThreadPoolExecutor(len(asked)) as threads:
            return list(threads.map(lambda pair: self.answer(pair[0], **pair[1], **fields), asked))

    def counters(self) -> dict[str, float]:
        """Returns the counters of vLLM's page and of the plugin's page."""
        return {name: value for url in self.metrics_urls for name, value in read_counters(url).items()}

    def num_drafted(self) -> float:
        return self.counters()["vllm:spec_decode_num_draft_tokens_total"]

    def stop(self) -> None:
        self.client.close()
        self._program.stop()


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Draft]:
    draft = Draft(tmp_path_factory.mktemp("draft"))
    yield draft
    draft.stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, draft: Draft) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"), draft.address)
    try:
        assert eventually(server.is_ready, _START_SECONDS)
        wait_until(lambda: server.counters()["outrider_draft_links_up"] == 1)
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def answers(server: Server) -> list[list[str]]:
    """With the pool."""
    return server.answers()


@only_in_soak
def test_two_engines_behind_one_server(tmp_path: Path, draft: Draft) -> None:
    server = Server(tmp_path, draft.address, num_engines=2)
    try:
        assert eventually(server.is_ready, _START_SECONDS)
        pages = server.metrics_urls[1:]
        wait_until(lambda: all(read_counters(page)["outrider_draft_links_up"] == 1 for page in pages))
        expected = server.answers(k=0)
        assert server.num_drafted() == 0
        assert server.answers() == expected
        assert server.num_drafted() > 0
        assert all(read_counters(page)["outrider_steps_total"] > 0 for page in pages)
    finally:
        server.stop()


def test_drafts_are_accepted_and_let_go(server: Server, draft: Draft, answers: list[list[str]]) -> None:
    counters = server.counters()
    assert counters["vllm:spec_decode_num_accepted_tokens_total"] > 0
    assert not [name for name in counters if name.startswith("outrider_coordinator_failures")]
    wait_until(lambda: read_counters(draft.metrics_url)["outrider_draft_sequences"] == 0)


def test_same_answers_when_the_draft_is_killed_midway(server: Server, draft: Draft) -> None:
    num_tokens = length(32, 200)
    expected = server.answers(max_tokens=num_tokens)  # long: some have to be under way when the draft is killed
    with ThreadPoolExecutor(1) as thread:

        def ask() -> Future[list[list[str]]]:
            wait_until(lambda: server.counters()["outrider_draft_links_up"] == 1)
            drafted = server.num_drafted()
            asked = thread.submit(server.answers, max_tokens=num_tokens)
            wait_until(lambda: asked.done() or server.num_drafted() > drafted)
            return asked

        while (again := ask()).done():  # on a busy machine the link may be down for all of the answers
            pass
        draft.kill()
        assert not again.done()
        assert again.result() == expected
    wait_until(lambda: server.counters()["outrider_draft_links_up"] == 0)


def test_same_answers_without_the_pool(server: Server, draft: Draft, answers: list[list[str]]) -> None:
    """Without draft workers, no step has rows for drafts."""
    wait_until(lambda: server.counters()["outrider_draft_links_up"] == 0)
    rounds = server.counters()["vllm:spec_decode_num_drafts_total"]
    assert server.answers() == answers
    assert server.counters()["vllm:spec_decode_num_drafts_total"] == rounds


@only_in_soak
def test_speculates_again_when_the_draft_is_back(server: Server, draft: Draft, answers: list[list[str]]) -> None:
    draft.start()
    assert eventually(lambda: server.counters()["outrider_draft_links_up"] == 1)
    drafted = server.num_drafted()
    assert server.answers() == answers
    assert server.num_drafted() > drafted


@only_in_soak
def test_a_request_chooses_its_k(server: Server) -> None:
    drafted = server.num_drafted()
    plain = server.answer(PROMPTS[0], k=0)
    assert server.num_drafted() == drafted
    assert server.answer(PROMPTS[0], k=MAX_K) == plain
    assert server.num_drafted() > drafted
    for k in (MAX_K + 1, -1, 1.5, "2"):
        with pytest.raises(openai.BadRequestError, match="num_speculative_tokens"):
            server.answer(PROMPTS[0], k=k)


@only_in_soak
def test_choices_and_requests_without_a_seed_differ(server: Server) -> None:
    first, second, third = server.answer(PROMPTS[1], n=3, temperature=1.0)
    assert first != second != third != first
    assert server.answer(PROMPTS[1], temperature=1.0) == [first]
    unseeded: dict[str, Any] = {"model": MODEL, "prompt": PROMPTS[1], "max_tokens": 40, "temperature": 1.0}
    texts = {server.client.completions.create(**unseeded).choices[0].text for _ in range(2)}
    assert len(texts | {first}) == 3


@only_in_soak
def test_client_that_leaves_is_forgotten_by_the_draft(server: Server, draft: Draft) -> None:
    stream = server.client.completions.create(
        model=MODEL, prompt=PROMPTS[0], max_tokens=200, temperature=1.0, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    wait_until(lambda: read_counters(draft.metrics_url)["outrider_draft_sequences"] == 1)
    stream.close()
    wait_until(lambda: read_counters(draft.metrics_url)["outrider_draft_sequences"] == 0)
