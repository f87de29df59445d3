"""A draft worker that knows the answers and hides them in trees."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from cluster.drafters.ngram import NgramDrafter
from cluster.drafting.entries import Deliver
from cluster.engine.limits import StepLimits
from cluster.engine.runner import ModelRunner
from cluster.speculation.drafts import Drafts, depths_of
from cluster.wire.messages import Proposal, SpeculateReply, SpeculateRequest
from tests.background_loop import BackgroundLoop

from .loopback import LoopbackDraft

VOCAB_SIZE = 512


class OracleWorker:
    """Answers like a DraftWorker, with random trees of up to 20 nodes, many of them true."""

    error = None

    def __init__(self, truths: Sequence[Sequence[int]]) -> None:
        self._truths = truths
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
        (truth, *_) = [t for t in self._truths if list(t[: len(tokens)]) == tokens]
        drafts = self._tree([*truth[len(tokens) :], *[1] * 20])
        return Proposal(wire_id, len(tokens), drafts.token_ids, drafts.parents)

    def _tree(self, rest: Sequence[int]) -> Drafts:
        """Each node is of a random parent; where that is on the true path, it is often the next on it."""
        token_ids: list[int] = []
        parents: list[int] = []
        true_path = [-1]
        for node in range(self._choose.randint(0, 20)):
            parent = self._choose.choice([true_path[-1], self._choose.randrange(-1, node)])
            is_true = parent == true_path[-1] and self._choose.random() < 0.7
            depth = 0 if parent < 0 else depths_of(parents)[parent]
            token = rest[depth] if is_true else self._choose.randrange(VOCAB_SIZE)
            if any(other == (parent, token) for other in zip(parents, token_ids, strict=True)):
                break  # siblings differ
            if is_true:
                true_path.append(node)
            token_ids.append(token)
            parents.append(parent)
        return Drafts.tree(token_ids, parents)


class OracleDraft(LoopbackDraft):
    def __init__(self, loop: BackgroundLoop, runner: ModelRunner, truths: Sequence[Sequence[int]]) -> None:
        self._truths = truths
        super().__init__(loop, runner)

    def start(self) -> None:
        # It says how large it is; nobody asks it for more.
        self.drafter: Any = NgramDrafter(VOCAB_SIZE, StepLimits(256, 64, 512))
        self.worker: Any = OracleWorker(self._truths)
        self._loop.run(self._serve())

    def stop(self, grace: float | None = None) -> None:
        self._loop.run(self._server.stop(grace))
