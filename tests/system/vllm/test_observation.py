"""Tests that news of each step of vLLM's engine core reaches the worker's process and its observers."""

from __future__ import annotations

import itertools
import secrets
from dataclasses import replace

import grpc

from protos.speculation.v1 import target_pb2, target_pb2_grpc
from tests.system.client import Case, complete_all
from tests.system.vllm.programs import Programs
from tests.waiting import WAIT_S, eventually

K = 4


def observe(address: str, seen: target_pb2.Observation | None = None) -> target_pb2.Observation:
    request = target_pb2.ObserveRequest()
    if seen is not None:
        request = target_pb2.ObserveRequest(from_step=seen.next_step, from_answer=seen.next_answer)
    with grpc.insecure_channel(address) as channel:
        observation: target_pb2.Observation = target_pb2_grpc.TargetStub(channel).Observe(request, timeout=WAIT_S)
    return observation


def test_steps_and_answers_are_told(programs: Programs, cases: list[Case]) -> None:
    programs.use("right")
    addresses = [target["address"] for target in programs.health()["targets"]]
    before = {address: observe(address) for address in addresses}
    some = [replace(case, max_tokens=24) for case in cases if len(case.prompt) > 16][:4]

    def news() -> list[target_pb2.Observation]:
        return [observe(address, before[address]) for address in addresses]

    def tells_of_drafts() -> bool:
        new = {"cache_salt": secrets.token_hex()}  # no target has computed their prompts
        complete_all(programs.url, some, num_speculative_tokens=K, concurrency=1, **new)
        return any(span.num_proposals for one in news() for span in one.answers)

    # The last answers are on their way for a moment, and proposals may be late on a busy machine.
    assert eventually(tells_of_drafts, 60, 1), programs.state()
    assert eventually(lambda: any(span.num_rows > span.num_sequences for one in news() for span in one.steps))
    told = [one for one in news() if one.steps]
    assert told
    for one in told:
        assert one.tells_steps
        assert any(span.has_prompts for span in one.steps)
        for span in one.steps:  # requests came one after the other
            assert span.num_rows <= (1 + K) * max(1, span.num_sequences)
            assert span.seconds > 0
        for earlier, later in itertools.pairwise(one.steps):
            assert later.ended_at - later.seconds >= earlier.ended_at - 0.005
        for span in one.answers:
            assert span.draft == programs.draft_addresses["right"]
            assert 0 <= span.held_seconds <= span.seconds + 0.005
    programs.use()
