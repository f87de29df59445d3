"""Tests of faults in a Ray cluster under load: no request fails, and all tokens equal those of a local cluster."""

from __future__ import annotations

import httpx
import pytest

from bench.fault_load import Answers, Question, under_load
from bench.fault_ray import FAULTS, RayFaultCluster, measure_fault, programs
from tests.soak import length, only_in_soak
from tests.waiting import WAIT_S, eventually

MENDED_SECONDS = 300.0
# What only a cluster of several nodes has. Other tests kill and freeze single programs, roll, and scale the drafts.
IN_CI = ("lose a target's node",)


def test_pools_are_where_they_belong_and_known(cluster: RayFaultCluster) -> None:
    targets, drafts, routers = (cluster.members(pool) for pool in ("target", "draft", "router"))
    assert [len(members) for members in (targets, drafts, routers)] == [2, 2, 2]
    assert {cluster.nodes.kinds[str(member.node.host)] for member in targets} == {"A100"}
    assert {member.node.zone for member in targets} == {"a", "b"}
    assert {cluster.nodes.kinds[str(member.node.host)] for member in drafts} == {"A10G"}
    assert {member.node.host for member in routers} == {cluster.nodes.head}
    assert len({member.fingerprint for member in (*targets, *drafts)}) == 1
    assert all(member.load is not None for member in (*targets, *drafts))


@pytest.mark.parametrize("is_streamed", [False, True])
def test_serves_proxy_passes_requests_through(
    cluster: RayFaultCluster, questions: list[Question], is_streamed: bool
) -> None:
    body = questions[0].body | {"stream": is_streamed, "max_tokens": 8}
    answers = [
        httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_S)
        for url in (cluster.urls[0], cluster.nodes.proxy_url)
    ]
    direct, proxied = (_token_ids(answer, is_streamed) for answer in answers)
    assert len(direct) == 8
    assert proxied == direct
    assert answers[1].headers["x-outrider-seed"] == str(questions[0].seed)
    assert answers[1].headers["content-type"] == answers[0].headers["content-type"]


def test_serves_proxy_passes_errors_through(cluster: RayFaultCluster) -> None:
    for url in (cluster.urls[0], cluster.nodes.proxy_url):
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "temperature": -1}, timeout=WAIT_S)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "temperature"


@pytest.mark.parametrize("name", length(IN_CI, tuple(FAULTS)))
def test_no_request_fails_and_no_token_differs(
    cluster: RayFaultCluster, questions: list[Question], expected: Answers, name: str
) -> None:
    row = measure_fault(cluster, name, questions, expected)
    print(row)
    assert row.num_sent > len(questions), "the load ended before the fault"
    assert (row.num_failed, row.num_different_tokens) == (0, 0), row
    assert eventually(lambda: (len(cluster.members("target")), len(cluster.members("draft"))) == (2, 2), MENDED_SECONDS)
    assert eventually(lambda: len(programs()) == 6, MENDED_SECONDS)


@only_in_soak
def test_a_lost_registry_fills_again(cluster: RayFaultCluster, questions: list[Question], expected: Answers) -> None:
    before = sorted(address for _, address in programs())

    def lose_registry() -> str:
        cluster.lose_registry()
        return ""

    tally, _ = under_load(cluster.urls, questions, expected, lose_registry, 2.0)
    assert (tally.num_failed, tally.num_different_tokens) == (0, 0), tally
    assert (len(before), cluster.addresses()) == (6, before)


def _token_ids(answer: httpx.Response, is_streamed: bool) -> list[int]:
    assert answer.status_code == 200, answer.text
    if not is_streamed:
        return answer.json()["choices"][0]["token_ids"]
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [token for event in events for token in httpx.Response(200, text=event).json()["choices"][0]["token_ids"]]
