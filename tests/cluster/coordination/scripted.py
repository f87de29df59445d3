"""A pool whose links and clock are the test's, and one sequence with its engine and drafter."""

from __future__ import annotations

import heapq
import itertools

from cluster.coordination.base import LinkEvent, LinkState
from cluster.coordination.coordinator import Coordinator
from cluster.coordination.sequence import Round, SpeculativeSequence
from cluster.engine.limits import StepLimits
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.wire.messages import Advance, Proposal, SpeculateReply, SpeculateRequest

LIMITS = StepLimits(max_model_len=4096, max_num_seqs=64, max_num_batched_tokens=512)
VOCAB_SIZE = 1000
TIMEOUT_S = 0.050
PROMPT = [1, 2, 3]
K = 4


class ScriptedLink:
    """Keeps what is sent on it."""

    def __init__(self, name: str) -> None:
        self.name = self.address = name
        self.model = "draft"
        self.is_one_pass = False
        self.expected_round_trip: float | None = None
        self.sent: list[SpeculateRequest] = []

    def send(self, request: SpeculateRequest) -> None:
        self.sent.append(request)

    def take_sent(self) -> list[SpeculateRequest]:
        sent, self.sent = self.sent, []
        return sent


class ScriptedPool:
    """Stands for a DraftPool: what happens on the links, and when. Time passes only while someone waits."""

    def __init__(self) -> None:
        self.now = 100.0
        self.trial_share = 0.02
        self.drafts_in_turn = False
        self.drafting_seconds = 0.0
        self.num_turns_lent = 0
        self._numbers = itertools.count()
        self._coming: list[tuple[float, int, LinkEvent]] = []

    def clock(self) -> float:
        return self.now

    def happens(self, link: ScriptedLink, event: LinkState | SpeculateReply, after: float = 0.0) -> None:
        happened = LinkEvent(link, event)
        heapq.heappush(self._coming, (self.now + after, next(self._numbers), happened))

    def lend_turn(self) -> None:
        self.num_turns_lent += 1

    def poll(self, timeout: float = 0.0) -> list[LinkEvent]:
        until = self.now + timeout
        if self._coming and self._coming[0][0] <= until:
            self.now = max(self.now, self._coming[0][0])
        else:
            self.now = until
        events = []
        while self._coming and self._coming[0][0] <= self.now:
            events.append(heapq.heappop(self._coming)[2])
        return events


def new_sequence(
    k: int | None = K, prompt: list[int] = PROMPT, output_limit: float | None = None
) -> SpeculativeSequence:
    return SpeculativeSequence(
        list(prompt), len(prompt), SamplingParams(), NoiseKey(1, 2), k, output_limit=output_limit
    )


class Rounds:
    """One sequence, opened on `link`, and its engine and drafter."""

    def __init__(self, coordinator: Coordinator, pool: ScriptedPool, link: ScriptedLink) -> None:
        self.coordinator, self.pool, self.link = coordinator, pool, link
        self.sequence = new_sequence()
        coordinator.begin((), [self.sequence])
        self.opening = link.take_sent()

    def proposes(self, base: int, *tokens: int, after: float = 0.0) -> None:
        reply = SpeculateReply(proposals={self.sequence.wire_id: Proposal(self.sequence.wire_id, base, tokens)})
        self.pool.happens(self.link, reply, after)

    def refuses(self) -> None:
        self.pool.happens(self.link, SpeculateReply(refused={self.sequence.wire_id}))

    def loses(self) -> None:
        self.pool.happens(self.link, SpeculateReply(lost={self.sequence.wire_id}))

    def drafts(self) -> list[int]:
        """Returns the drafts that the next step verifies."""
        return list(self.coordinator.begin([self.sequence])[self.sequence].token_ids)

    def commits(self, *tokens: int) -> list[SpeculateRequest]:
        """Ends a step that commits `tokens`, and begins the next one. Returns the messages that were sent."""
        self.sequence.token_ids.extend(tokens)
        self.coordinator.end([Round(self.sequence)])
        self.coordinator.begin(())
        return self.link.take_sent()

    def advance(self, base: int, *tokens: int) -> list[SpeculateRequest]:
        """One message that tells `tokens`."""
        wire_id = self.sequence.wire_id
        return [SpeculateRequest(advances={wire_id: Advance(wire_id, base, list(tokens), K)})]
