"""A cluster as its users and operators meet it: real clients, cancelled requests, dead workers, start and end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from bench.workload import read_counters
from services.launch.local import LocalCluster
from tests.system.client import Case, complete_all
from tests.system.conftest import PATIENT, READY_TIMEOUT_SECONDS, cluster_config
from tests.waiting import WAIT_S, eventually

PROMPT = "def main("


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
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert whole.usage.completion_tokens <= 40


@pytest.mark.parametrize("seed", [None, 11])
def test_prompts_that_are_alike_get_answers_of_their_own(cluster: LocalCluster, seed: int | None) -> None:
    fields = {"prompt": [PROMPT] * 3, "max_tokens": 24, "return_token_ids": True}
    body = httpx.post(f"{cluster.url}/v1/completions", json=fields | {"seed": seed}, timeout=WAIT_S).json()
    answers = [choice["token_ids"] for choice in body["choices"]]
    assert len({tuple(answer) for answer in answers}) == 3
    again = fields | {"prompt": PROMPT, "n": 3, "seed": body["seed"]}
    choices = httpx.post(f"{cluster.url}/v1/completions", json=again, timeout=WAIT_S).json()["choices"]
    assert [choice["token_ids"] for choice in choices] == answers


def test_openai_client_chats(cluster: LocalCluster) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Write a function that adds numbers."}]
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        whole = client.chat.completions.create(model=model, messages=messages, n=2, seed=3, max_completion_tokens=24)
        stream = client.chat.completions.create(
            model=model, messages=messages, n=2, seed=3, max_completion_tokens=24, stream=True
        )
        texts = ["", ""]
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == [choice.message.content for choice in whole.choices]
        assert texts[0] != texts[1]
        stop = texts[0][3:6]
        stopped = client.chat.completions.create(
            model=model, messages=messages, seed=3, max_completion_tokens=24, stop=[stop]
        )
        assert stopped.choices[0].message.content == texts[0][: texts[0].index(stop)]
        assert stopped.choices[0].finish_reason == "stop"
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.chat.completions.create(model=model, messages=messages, temperature=9)
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="another", messages=messages)


def test_every_draft_is_accepted_when_the_draft_is_the_target(cluster: LocalCluster) -> None:
    """The greedy path of a round, all accepted and the bonus token on top, shown on counters."""
    # So large a draft does not pay; at another temperature it is not the target.
    settings = (
        "draft.model=outrider-target-12m",
        "speculation.controller=fixed",
        "speculation.tune_draft_temperature=false",
    )
    with LocalCluster(cluster_config(PATIENT, *settings)) as twin:
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


BAD_BODIES: list[tuple[str, bytes, int]] = [
    ("malformed JSON", b'{"prompt": "x"', 400),
    ("not an object", b"[1, 2]", 400),
    ("invalid UTF-8", b'{"prompt": "\xff\xfe"}', 400),
    ("NaN", b'{"prompt": "x", "temperature": NaN}', 400),
    ("temperature as text", b'{"prompt": "x", "temperature": "0.5"}', 400),
    ("empty prompt", b'{"prompt": ""}', 400),
    ("over-long prompt", json.dumps({"prompt": [5] * 4000}).encode(), 400),
    ("negative max_tokens", b'{"prompt": "x", "max_tokens": -1}', 400),
    ("huge max_tokens", b'{"prompt": "x", "max_tokens": 1000000}', 400),
    ("ID outside the vocabulary", b'{"prompt": [4096]}', 400),
    ("top_p 0", b'{"prompt": "x", "top_p": 0}', 400),
    ("a million choices", b'{"prompt": "x", "n": 1000000}', 400),
    ("huge logit_bias", b'{"prompt": "x", "logit_bias": {"5": 1e9}}', 400),
    ("unknown model", b'{"prompt": "x", "model": "another"}', 404),
    ("over the body's limit", b'{"prompt": "' + b"x" * 2**25 + b'"}', 413),
]


def test_every_metric_on_a_page_is_explained(cluster: LocalCluster) -> None:
    explained = (Path(__file__).parents[2] / "docs" / "MONITORING.md").read_text(encoding="utf-8")
    pages = [f"{cluster.url}/metrics", *(worker.metrics_url for worker in (*cluster.targets, *cluster.drafts))]
    for url in pages:
        names = re.findall(r"^# TYPE (\S+)", httpx.get(url).text, re.MULTILINE)
        assert len(names) > 8, url
        assert not [name for name in names if f"`{name}`" not in explained], url


def test_bad_input_reaches_no_worker(cluster: LocalCluster) -> None:
    """The router's own tests have many more; here the workers are looked at, and the next request."""
    target = cluster.targets[0].metrics_url
    before = read_counters(target)["outrider_steps_total"]
    with httpx.Client(base_url=cluster.url, timeout=WAIT_S) as client:
        for name, content, status in BAD_BODIES:
            reply = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
            assert reply.status_code == status, (name, reply.text)
            assert len(reply.json()["error"]["message"]) <= 500
        reply = client.post("/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": "text/plain"})
        assert reply.status_code == 415
        assert read_counters(target)["outrider_steps_total"] == before
        assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200


def test_answers_survive_dead_drafts_and_a_dead_target_comes_back(cluster: LocalCluster) -> None:
    """Last in this file: it leaves the session's cluster with new processes."""
    case = Case((300, 301, 302), 5, 60, {"temperature": 0.7, "ignore_eos": True})
    (expected,) = complete_all(cluster.url, [case])
    os.kill(cluster.drafts[0].pid, signal.SIGKILL)
    (without_draft,) = complete_all(cluster.url, [case])
    assert without_draft == expected
    os.kill(cluster.targets[0].pid, signal.SIGKILL)
    assert eventually(lambda: not cluster.is_ready())  # the router's last look may be half a second old
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


def test_serve_refuses_rejection_with_another_tokenizer() -> None:
    models = ("--target", "outrider-draft-smollm2-135m", "--draft", "outrider-draft-2m")
    serve = run_serve("--port", "0", *models, "--set", "speculation.acceptance=rejection")
    _, errors = serve.communicate(timeout=WAIT_S)
    assert serve.returncode == 2
    assert "'outrider-draft-2m' needs the tokenizer of 'outrider-draft-smollm2-135m'" in errors.splitlines()[-1]


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
        _, errors = serve.communicate(timeout=WAIT_S)
    assert serve.returncode == 2
    assert complaint in errors.splitlines()[-1]
    assert "Traceback" not in errors
