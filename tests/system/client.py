"""A small client of the completions endpoint, for many requests at a time, and what should hold after them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.workload import read_counters
from services.launch.local import LocalCluster
from tests.waiting import eventually

_BACK_S = 3.0  # after which one who found nobody to answer asks again

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt with everything that decides its answer."""

    prompt: tuple[int, ...]
    seed: int
    max_tokens: int
    fields: Fields = field(default_factory=dict)  # sampling


def complete(client: httpx.Client, case: Case, *, asks_again: bool = False, **more: Any) -> list[int]:
    """The token IDs of the answer to `case`.

    `asks_again`: once, as clients do, where nobody can answer now: where a machine is too busy its only target may not
    answer for some seconds.
    """
    body = {
        "prompt": list(case.prompt),
        "seed": case.seed,
        "max_tokens": case.max_tokens,
        "return_token_ids": True,
        **case.fields,
        **more,
    }
    response = client.post("/v1/completions", json=body)
    if asks_again and response.status_code == 503:
        time.sleep(_BACK_S)
        response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    token_ids: list[int] = response.json()["choices"][0]["token_ids"]
    return token_ids


def complete_all(url: str, cases: Sequence[Case], concurrency: int = 8, **more: Any) -> list[list[int]]:
    """The answers to `cases`, `concurrency` of them at a time."""
    with httpx.Client(base_url=url, timeout=300) as client, ThreadPoolExecutor(concurrency) as threads:
        return list(threads.map(lambda case: complete(client, case, **more), cases))


def assert_nothing_in_use(cluster: LocalCluster) -> None:
    for worker in (*cluster.targets, *cluster.drafts):
        assert eventually(lambda url=worker.metrics_url: _is_zero(url, "outrider_kv_blocks_used")), worker.name
    for draft in cluster.drafts:
        assert eventually(lambda url=draft.metrics_url: _is_zero(url, "outrider_draft_sequences")), draft.name


def _is_zero(metrics_url: str, name: str) -> bool:
    """False, too, of a worker that is being started again and has no page yet."""
    try:
        return read_counters(metrics_url)[name] == 0
    except httpx.TransportError:
        return False
