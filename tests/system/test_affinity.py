"""The turns of a conversation meet on one target, where their keys and values are kept."""

from __future__ import annotations

import httpx
import pytest

from bench.workload import held_out_prompts, read_counters
from services.launch.local import LocalCluster
from tests.soak import length
from tests.waiting import WAIT_S

NUM_CONVERSATIONS = 8
NUM_TURNS = 3
OPENING_TOKENS = 64
TURN_TOKENS = 32


@pytest.mark.parametrize("way", length(["prompt_cache_key"], ["prompt_cache_key", "x-session-id"]))
def test_later_turns_find_their_prefix(two_of_each: LocalCluster, way: str) -> None:
    missed = []  # turns without their prefix: a target that is silent for a moment loses its turn to the other one
    generated_before = [_generated(target.metrics_url) for target in two_of_each.targets]
    with httpx.Client(base_url=two_of_each.url, timeout=WAIT_S) as client:
        for number, prompt in enumerate(held_out_prompts(NUM_CONVERSATIONS, seed=len(way))):
            text, name = list(prompt[:OPENING_TOKENS]), f"{way} {number}"
            headers = {"x-session-id": name} if way == "x-session-id" else {}
            for turn in range(NUM_TURNS):
                fields = {"prompt_cache_key": name} if way == "prompt_cache_key" else {}
                body = {
                    "prompt": text,
                    "max_tokens": TURN_TOKENS,
                    "ignore_eos": True,
                    "return_token_ids": True,
                    **fields,
                }
                reply = client.post("/v1/completions", json=body, headers=headers).raise_for_status().json()
                cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
                known = OPENING_TOKENS + TURN_TOKENS * (turn - 1) if turn else 0
                if cached < known - TURN_TOKENS:
                    missed.append(f"turn {turn} of {name}")
                text += reply["choices"][0]["token_ids"]
    assert len(missed) <= 2, missed
    generated = [_generated(target.metrics_url) for target in two_of_each.targets]
    assert all(after > before for before, after in zip(generated_before, generated, strict=True)), "one had all of them"


def _generated(url: str) -> float:
    return read_counters(url)["outrider_committed_tokens_total"]
