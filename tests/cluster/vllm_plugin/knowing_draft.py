"""A draft worker that knows the answers, and proposes as well as the test wants."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Literal

import grpc

from cluster.config import Config
from cluster.drafters.ngram import NgramDrafter
from cluster.drafting.entries import Deliver
from cluster.engine.limits import StepLimits
from cluster.wire.messages import Proposal, SpeculateReply, SpeculateRequest
from protos.speculation.v1 import draft_pb2_grpc, types_pb2
from services.draft.servicer import DraftServicer
from services.draft.versions import Version
from tests.background_loop import BackgroundLoop

Quality = Literal["random", "good"]


class _Worker:
    """Answers like a DraftWorker, with chains of varying length."""

    error = None

    def __init__(self, vocab_size: int) -> None:
        self.quality: Quality = "good"
        self.truths: Sequence[Sequence[int]] = ()  # prompts with their answers
        self._vocab_size = vocab_size
        self._choose = random.Random(0)
        self._deliver: dict[int, Deliver] = {}
        self._tokens: dict[tuple[int, int], list[int]] = {}

    @property
    def num_sequences(self) -> int:
        return len(self._tokens)

    def attach(self, deliver: Deliver) -> int:
        self._deliver[len(self._deliver)] = deliver
        return len(self._deliver) - 1

    def detach(self, link: int) -> None:
        self._tokens = {key: tokens for key, tokens in self._tokens.items() if key[0] != link}

    def num_waiting_bytes(self, link: int) -> int:
        return 0

    def receive(self, link: int, request: SpeculateRequest, num_bytes: int = 0) -> None:
        for wire_id in request.closes:
            self._tokens.pop((link, wire_id), None)
        for opening in request.opens.values():
            self._tokens[link, opening.wire_id] = list(opening.token_ids)
        for advance in request.advances.values():
            self._tokens[link, advance.wire_id][advance.base :] = advance.token_ids
        wire_ids = [*request.opens, *request.advances]
        self._deliver[link](SpeculateReply(proposals={wire_id: self._proposal(link, wire_id) for wire_id in wire_ids}))

    def _proposal(self, link: int, wire_id: int) -> Proposal:
        tokens = self._tokens[link, wire_id]
        return Proposal(wire_id, len(tokens), self._drafts(tokens))

    def _drafts(self, tokens: list[int]) -> list[int]:
        length = self._choose.randint(1, 6)
        if self.quality == "random":
            return [self._choose.randrange(self._vocab_size) for _ in range(length)]
        truths = [truth for truth in self.truths if list(truth[: len(tokens)]) == tokens]
        drafts = list(self._choose.choice(truths)[len(tokens) :][:length]) if truths else []
        if drafts and self._choose.random() < 0.3:
            drafts[self._choose.randrange(len(drafts))] = self._choose.randrange(self._vocab_size)
        return drafts


class KnowingDraft:
    """On loopback."""

    def __init__(self, loop: BackgroundLoop, vocab_size: int, fingerprint: str) -> None:
        self.worker = _Worker(vocab_size)
        self.address = ""
        self._loop = loop
        self._description = types_pb2.ModelDescription(name="knowing", tokenizer_fingerprint=fingerprint)
        # Says how large it is; nobody asks it for more.
        self._drafter = NgramDrafter(vocab_size, StepLimits(256, 64, 512))
        loop.run(self._serve())

    async def _serve(self) -> None:
        # Links ask every two seconds whether it is there, as they may.
        patience = (("grpc.http2.min_ping_interval_without_data_ms", 1_000), ("grpc.http2.max_ping_strikes", 0))
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0), *patience])
        worker: Any = self.worker
        draft_pb2_grpc.add_DraftServicer_to_server(
            DraftServicer(Version(Config(), self._drafter, worker, self._description)), self._server
        )
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    def stop(self) -> None:
        self._loop.run(self._server.stop(None))
