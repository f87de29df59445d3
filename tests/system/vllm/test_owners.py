"""An owner of requests cannot keep the places of vLLM's engine from another one."""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Sequence

import grpc

from cluster.speculation.params import SamplingParams
from cluster.wire.codec import encode_sampling
from protos.speculation.v1 import target_pb2, target_pb2_grpc
from tests.system.vllm.conftest import SETTINGS
from tests.system.vllm.programs import Programs

NUM_PLACES = int(str(SETTINGS["target.max_num_seqs"]))
SAMPLING = encode_sampling(SamplingParams(temperature=0.0))


class Stream:
    """Calls of one stream, and their tokens so far."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._commands: queue.Queue[target_pb2.GenerateCommands | None] = queue.Queue()
        self._replies = target_pb2_grpc.TargetStub(channel).GenerateMany(iter(self._commands.get, None), timeout=240)
        self.tokens: defaultdict[int, list[int]] = defaultdict(list)
        self.finished: list[int] = []

    def start(self, owner: bytes, calls: Sequence[int], max_tokens: int, k: int) -> None:
        requests = [
            target_pb2.GenerateRequest(
                request_id=str(call),
                prompt_token_ids=[300 + call] * 20,
                max_tokens=max_tokens,
                ignore_eos=True,
                sampling=SAMPLING,
                num_speculative_tokens=k,
                owner=owner,
            )
            for call in calls
        ]
        starts = [target_pb2.StartCall(call=call, request=one) for call, one in zip(calls, requests, strict=True)]
        self._commands.put(target_pb2.GenerateCommands(start=starts))

    def read(self) -> None:
        """Reads one message."""
        replies = next(self._replies)
        assert not replies.errors
        tokens = iter(replies.token_ids)
        for call, number in zip(replies.calls, replies.num_tokens, strict=True):
            self.tokens[call] += [next(tokens) for _ in range(number)]
        self.finished += replies.finished


def test_each_has_places_and_the_tokens_stay_the_same(programs: Programs) -> None:
    programs.use("right")
    (address, *_) = [target["address"] for target in programs.health()["targets"]]
    greedy, late = range(1, NUM_PLACES + 3), range(50, 53)
    with grpc.insecure_channel(address) as channel:
        alone = Stream(channel)
        alone.start(b"", [*greedy, *late], 120, 0)
        while len(alone.finished) < len(greedy) + len(late):
            alone.read()
        shared = Stream(channel)
        shared.start(b"greedy", greedy, 120, 4)
        while sum(map(bool, shared.tokens.values())) < NUM_PLACES:
            shared.read()
        shared.start(b"late", late, 120, 4)
        while not all(shared.tokens[call] for call in late[:2]):
            shared.read()
        assert not shared.finished  # places were given back
        while len(shared.finished) < len(greedy) + len(late):
            shared.read()
        assert shared.tokens == alone.tokens
    programs.use()
