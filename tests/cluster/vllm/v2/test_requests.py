"""The requests that vLLM's model runner tells of, and that an error there ends speculation and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster.coordination.pool import DraftPool
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.vllm.coupling import Coupling
from cluster.vllm.couplings import couplings_of
from cluster.vllm.v2.requests import EngineRequests
from cluster.vllm.v2.settings import PluginSettings
from tests.background_loop import BackgroundLoop
from tests.waiting import wait_until

from .knowing_draft import KnowingDraft

MAX_MODEL_LEN = 16
K = 3
ANSWER = [7, 8, 9, 10, 11, 12]
_ATTEMPTS = 20  # a step does not wait for the last of its requests, whose drafts are late on a busy machine


class Buffer:
    def __init__(self, *shape: int) -> None:
        self.gpu = torch.zeros(shape, dtype=torch.int32)


class RequestStates:
    """The part of vLLM's that is used, with four slots."""

    def __init__(self) -> None:
        self.all_token_ids, self.total_len = Buffer(4, MAX_MODEL_LEN), Buffer(4)
        self.req_id_to_index: dict[str, int] = {}

    def add_request(
        self, req_id: str, prompt_len: int, all_token_ids: list[int], num_computed_tokens: int, max_tokens: int
    ) -> None:
        slot = 3 - len(self.req_id_to_index)
        self.req_id_to_index[req_id] = slot
        self.total_len.gpu[slot] = 0
        self.append(req_id, *all_token_ids)

    def apply_staged_writes(self) -> None:
        pass

    def remove_request(self, req_id: str) -> int | None:
        return self.req_id_to_index.pop(req_id, None)

    def append(self, req_id: str, *token_ids: int) -> None:
        slot = self.req_id_to_index[req_id]
        start = int(self.total_len.gpu[slot])
        self.all_token_ids.gpu[slot, start : start + len(token_ids)] = torch.tensor(token_ids, dtype=torch.int32)
        self.total_len.gpu[slot] += len(token_ids)


class Runner:
    """A model runner as far as it is seen here."""

    def __init__(self, draft_address: str) -> None:
        model = SimpleNamespace(max_model_len=MAX_MODEL_LEN, get_vocab_size=lambda: 100, served_model_name="m")
        scheduler = SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64)
        config = SimpleNamespace(model_config=model, scheduler_config=scheduler)
        speculation = {"num_speculative_tokens": K, "draft_timeout_ms": 10_000}
        settings = {"outrider": {"draft_addresses": [draft_address], "speculation": speculation}}
        self.states, pool = RequestStates(), DraftPool("the same")
        self.requests = EngineRequests(config, PluginSettings.of(settings), self.states, pool)
        self.requests.start()
        wait_until(lambda: pool.num_links_up == 1)

    def add(self, req_id: str, *token_ids: int, is_ours: bool = True) -> None:
        self.states.add_request(
            req_id=req_id, prompt_len=len(token_ids), all_token_ids=list(token_ids), num_computed_tokens=0, max_tokens=9
        )
        if is_ours:
            coupling = Coupling(SamplingParams(), NoiseKey(1, 2), len(token_ids))
            couplings_of(self.states.all_token_ids).put(self.states.req_id_to_index[req_id], coupling)
        self.states.apply_staged_writes()

    def step(self, **sampled: list[int]) -> Any:
        for req_id, token_ids in sampled.items():
            self.states.append(req_id, *token_ids)
        slots = torch.tensor([self.states.req_id_to_index[req_id] for req_id in sampled])
        verified = SimpleNamespace(tolist=lambda: [K] * len(sampled))
        batch = SimpleNamespace(req_ids=list(sampled), idx_mapping=slots, num_draft_tokens_per_req=verified)
        num_sampled = torch.tensor([len(token_ids) for token_ids in sampled.values()], dtype=torch.int32)
        return self.requests.after_step(batch, num_sampled, K)

    def metrics(self) -> dict[str, float]:
        return {reading.name: reading.value for reading in self.requests.readings()}


@pytest.fixture
def draft(loop: BackgroundLoop) -> Iterator[KnowingDraft]:
    draft = KnowingDraft(loop, 100, "the same")
    draft.worker.quality = "perfect"
    draft.worker.truths = [[1, 2, *ANSWER], [3, *ANSWER]]
    yield draft
    draft.stop()


@pytest.fixture
def runner(draft: KnowingDraft) -> Iterator[Runner]:
    runner = Runner(draft.address)
    yield runner
    runner.requests.stop()


def test_rows_are_as_wide_as_vllm_wants_them(runner: Runner) -> None:
    def first_step() -> Any:
        runner.add("a", 1, 2)
        runner.add("b", 3)
        return runner.step(b=[7], a=[7, 8])

    for _ in range(_ATTEMPTS):
        if (rows := first_step()) == [[8, 9, 10], [9, 10, 11]]:
            break
        runner.states.remove_request("b")
        runner.states.remove_request("a")
    else:
        pytest.fail(f"the drafts of one of two requests were late in {_ATTEMPTS} steps; the last has {rows}")
    runner.add("warm up", 5, is_ours=False)
    rows = runner.step(a=[9, 10, 11], b=[8, 9, 10, 11], **{"warm up": [6]})
    assert rows == [[12, 12, 12], [12, 12, 12], [6, 6, 6]]
    runner.add("c", 3)
    assert runner.step(c=[]) == [[0, 0, 0]]  # its prompt is not through


def test_requests_that_have_ended_are_closed(runner: Runner, draft: KnowingDraft) -> None:
    runner.add("a", 1, 2)
    wait_until(lambda: draft.worker.num_sequences == 1)
    runner.states.remove_request("a")
    wait_until(lambda: draft.worker.num_sequences == 0)
    assert runner.states.remove_request("a") is None


def test_a_request_that_was_preempted_comes_back(runner: Runner) -> None:
    runner.add("a", 1, 2)
    assert runner.step(a=[7]) == [[8, 9, 10]]
    runner.states.remove_request("a")
    runner.add("a", 1, 2, 7, 8)
    assert runner.step(a=[9]) == [[10, 11, 12]]


def test_an_error_ends_speculation_and_nothing_else(runner: Runner, draft: KnowingDraft) -> None:
    runner.add("a", 1, 2)
    assert runner.metrics()["outrider_speculation_failed"] == 0
    runner.states.total_len = SimpleNamespace(gpu=None)  # type: ignore[assignment]  # as if vLLM had changed it
    slots, counts = torch.tensor([0]), torch.tensor([1], dtype=torch.int32)
    batch = SimpleNamespace(req_ids=["a"], idx_mapping=slots, num_draft_tokens_per_req=None)
    assert runner.requests.after_step(batch, counts, K) is None
    assert runner.metrics()["outrider_speculation_failed"] == 1
    wait_until(lambda: draft.worker.num_sequences == 0)
    assert runner.requests.after_step(batch, counts, K) is None
    runner.states.remove_request("a")
