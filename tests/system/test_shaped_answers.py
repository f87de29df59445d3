"""Log-probabilities and constraints, alone and together: the same answer with speculation, without it, and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.config import Config
from cluster.model_folder import resolve_model_folder
from cluster.tokenization import Tokenizer
from services.launch.local import LocalCluster
from tests.soak import length, only_in_soak
from tests.system.conftest import READY_TIMEOUT_SECONDS, cluster_config
from tests.system.shaped_cases import (
    PERSON,
    Body,
    answer,
    assert_alike,
    one_of_each_constraint,
    shaped_bodies,
    streamed,
)
from tests.system.support import assert_table_is_true

BODIES = dict(shaped_bodies())
# The short run alternates between the two depths; the long run uses both for every body.
DEPTHS = {name: length((1 if number % 2 else 5,), (1, 5)) for number, name in enumerate(BODIES)}
BODIES_OF_TREES = length(one_of_each_constraint(), BODIES)
NUM_SCHEMA_ANSWERS = length(40, 200)
NUM_STREAMS = 8


@pytest.fixture(scope="module")
def client(cluster: LocalCluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.url, timeout=300) as client:
        yield client


@pytest.mark.parametrize("name", BODIES)
def test_speculation_changes_nothing(client: httpx.Client, name: str) -> None:
    body = BODIES[name]
    plain = answer(client, {**body, "num_speculative_tokens": 0})
    for k in DEPTHS[name]:
        assert_alike(plain, answer(client, {**body, "num_speculative_tokens": k}))
    assert_alike(plain, streamed(client, body))


@only_in_soak
def test_nor_do_trees(client: httpx.Client) -> None:
    bodies = BODIES_OF_TREES.items()
    plain = {name: answer(client, {**body, "num_speculative_tokens": 0}) for name, body in bodies}
    with LocalCluster(cluster_config("speculation.tree_width=3", "target.device=cpu")) as with_trees:
        with_trees.wait_ready(READY_TIMEOUT_SECONDS)
        with httpx.Client(base_url=with_trees.url, timeout=300) as other:
            for name, body in bodies:
                assert_alike(plain[name], answer(other, {**body, "num_speculative_tokens": 6}))


def test_a_random_draft_leaves_every_answer_valid(cluster_with_random_draft: LocalCluster) -> None:
    def ask(seed: int) -> httpx.Response:
        body: Body = {
            "messages": [{"role": "user", "content": f"person {seed}"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
            "max_tokens": 400,
            "n": 4,
            "seed": seed,
            "temperature": 0.8,
        }
        return client.post("/v1/chat/completions", json=body)

    with (
        httpx.Client(base_url=cluster_with_random_draft.url, timeout=300) as client,
        ThreadPoolExecutor(NUM_STREAMS) as threads,
    ):
        num_valid = 0
        for response in threads.map(ask, range(NUM_SCHEMA_ANSWERS // 4)):
            assert response.status_code == 200, response.text
            for choice in response.json()["choices"]:
                assert choice["finish_reason"] == "stop"
                jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)
                num_valid += 1
        assert num_valid == NUM_SCHEMA_ANSWERS


@pytest.fixture(scope="module")
def reference() -> Any:
    return AutoModelForCausalLM.from_pretrained(resolve_model_folder(Config().target.model), dtype=torch.float32)


def test_log_probabilities_are_the_models_own(client: httpx.Client, reference: Any) -> None:
    """Whatever shapes the distribution that tokens are drawn from."""
    for name, body in BODIES.items():
        if "logprobs" not in body or not body["logprobs"]:
            continue
        prompt = _prompt_token_ids(body)
        for choice in answer(client, {**body, "echo": True}):
            token_ids = [*prompt, *choice["token_ids"]]
            with torch.no_grad():
                expected = reference(torch.tensor([token_ids])).logits[0].log_softmax(-1)
            scores = choice["logprobs"]
            assert scores["token_logprobs"][0] is None
            assert scores["top_logprobs"][0] is None
            for place, token in enumerate(token_ids[1:]):
                told = scores["token_logprobs"][place + 1]
                assert abs(told - expected[place, token].item()) < 1e-4, (name, place)
                top = sorted(scores["top_logprobs"][place + 1].values(), reverse=True)
                best = expected[place].topk(body["logprobs"]).values.tolist()
                assert top[: len(best)] == pytest.approx(best, abs=1e-4)


def test_a_prompt_is_scored_by_prefill(client: httpx.Client, cluster: LocalCluster) -> None:
    """In one step or, where the machine is slow, in parts of 16 tokens at least; nothing is decoded."""

    def num_steps() -> dict[str, float]:
        page = httpx.get(cluster.targets[0].metrics_url).text
        lines = [line.split() for line in page.splitlines() if line.startswith("outrider_steps_total{")]
        return {name.split('"')[1]: float(value) for name, value in lines}

    before = num_steps()
    body: Body = {"prompt": list(range(3, 203)), "echo": True, "logprobs": 1, "max_tokens": 0}
    (choice,) = answer(client, body)
    assert len(choice["logprobs"]["tokens"]) == 200
    steps = {kind: number - before[kind] for kind, number in num_steps().items()}
    assert 1 <= steps.pop("prefill") <= 13
    assert not any(steps.values())


def _prompt_token_ids(body: Body) -> list[int]:
    return Tokenizer(resolve_model_folder(Config().target.model)).encode(body["prompt"])


def test_what_the_page_says_is_supported_is(cluster: LocalCluster) -> None:
    assert_table_is_true(cluster.url, "torch")


def test_and_of_simulated_engines() -> None:
    settings = ("target.engine=simulated", "draft.drafter=simulated")
    with LocalCluster(cluster_config(*settings)) as simulated:
        simulated.wait_ready(READY_TIMEOUT_SECONDS)
        assert_table_is_true(simulated.url, "simulated")
