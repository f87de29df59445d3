"""The rounds alone, back to back in one thread: a coordinator and the codec, with a pool that answers at once.

What is left of a step's coordination when caches are warm and no thread has to be woken; used by `bench.coordination`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, cast

from cluster.config.speculation import SpeculationConfig
from cluster.coordination.base import LinkEvent, LinkState
from cluster.coordination.coordinator import Coordinator, StepTiming
from cluster.coordination.link import DraftLink
from cluster.coordination.pool import DraftPool
from cluster.coordination.sequence import Round, SpeculativeSequence
from cluster.engine.limits import StepLimits
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.wire.codec import decode_reply, encode_reply, encode_request
from cluster.wire.messages import Advance, Open, Proposal, SpeculateReply, SpeculateRequest, Timing
from protos.speculation.v1 import draft_pb2

VOCAB_SIZE = 128_256
ACCEPTANCE = 0.75
STEP_SECONDS, DRAFT_STEP_SECONDS = 0.06, 0.001  # what the coordinator is told that they take
CONTEXT_LEN = 200
MAX_NUM_SEQS = 256


class _Link:
    """Keeps what was sent since the last time."""

    address, model, expected_round_trip, is_one_pass = "draft", "", None, False

    def __init__(self) -> None:
        self._request = SpeculateRequest()

    def send(self, request: SpeculateRequest) -> None:
        self._request.merge(request)

    def take(self) -> SpeculateRequest:
        request, self._request = self._request, SpeculateRequest()
        return request


class _Pool:
    """Hands out what is put in."""

    trial_share = 0.0
    drafts_in_turn = False
    drafting_seconds = 0.0

    def __init__(self) -> None:
        self.events: list[LinkEvent] = []

    def lend_turn(self) -> None:
        pass

    def poll(self, timeout: float = 0.0) -> list[LinkEvent]:
        events, self.events = self.events, []
        return events


class RoundsAlone:
    def __init__(self, num_sequences: int, num_drafts: int) -> None:
        self._rng = random.Random(0)
        self._pool, self._link = _Pool(), _Link()
        config = SpeculationConfig(num_speculative_tokens=num_drafts, max_speculative_tokens=num_drafts)
        limits = StepLimits(max_model_len=2**20, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=4096)
        self._coordinator = Coordinator(cast(DraftPool, self._pool), config, VOCAB_SIZE, limits)
        self._coordinator.observe_step_times((2**exponent, STEP_SECONDS) for exponent in range(12))
        self._codec_seconds = 0.0
        self._happens(LinkState.UP)
        self._sequences = [self._new_sequence(number) for number in range(num_sequences)]
        self._coordinator.begin((), self._sequences)
        self._answers()

    def _new_sequence(self, number: int) -> SpeculativeSequence:
        tokens = [self._token() for _ in range(CONTEXT_LEN)]
        return SpeculativeSequence(tokens, CONTEXT_LEN, SamplingParams(), NoiseKey(number, 0), None)

    def _token(self) -> int:
        return self._rng.randrange(VOCAB_SIZE)

    def _happens(self, event: LinkState | SpeculateReply) -> None:
        answer_seconds = 6 * DRAFT_STEP_SECONDS
        self._pool.events.append(LinkEvent(cast(DraftLink, self._link), event, answer_seconds))

    @property
    def critical_seconds(self) -> float:
        """Processor time of the critical part on both threads since the start."""
        return self._coordinator.stats.critical_seconds + self._codec_seconds

    @property
    def other_seconds(self) -> float:
        return self._coordinator.stats.other_seconds

    def step(self) -> None:
        drafts = self._coordinator.begin(self._sequences)
        rounds = []
        for sequence, offered in drafts.items():
            num_accepted = 0
            while num_accepted < len(offered) and self._rng.random() < ACCEPTANCE:
                num_accepted += 1
            chosen = [*offered.token_ids[:num_accepted], self._token()]
            cast(list[int], sequence.token_ids).extend(chosen)
            rounds.append(Round(sequence, offered, chosen))
        num_rows = sum(len(offered) + 1 for offered in drafts.values())
        self._coordinator.end(rounds, StepTiming(num_rows, STEP_SECONDS))
        self._answers()

    def _answers(self) -> None:
        """The drafter's answer to the last request, for the next step to take in."""
        request = self._link.take()
        with self._codec_timed():
            encode_request(request).ByteSize()
        payload = self._answer(request).SerializeToString()
        message = draft_pb2.SpeculateReply.FromString(payload)
        with self._codec_timed():
            self._happens(decode_reply(message))

    @contextmanager
    def _codec_timed(self) -> Iterator[None]:
        started_at = time.thread_time()
        yield
        self._codec_seconds += time.thread_time() - started_at

    def _answer(self, request: SpeculateRequest) -> draft_pb2.SpeculateReply:
        timing = Timing(5 * DRAFT_STEP_SECONDS, DRAFT_STEP_SECONDS, len(self._sequences))
        entries: list[Open | Advance] = [*request.opens.values(), *request.advances.values()]
        proposals = {entry.wire_id: self._proposal(entry) for entry in entries}
        return encode_reply(SpeculateReply(proposals=proposals, timing=timing))

    def _proposal(self, entry: Open | Advance) -> Proposal:
        base = len(entry.token_ids) + (entry.base if isinstance(entry, Advance) else 0)
        return Proposal(entry.wire_id, base, [self._token() for _ in range(entry.num_owed)])


class RoundsTime(NamedTuple):
    """Mean milliseconds of processor time of a step."""

    critical_ms: float
    other_ms: float


def time_rounds(num_sequences: int, num_drafts: int, num_steps: int, repeats: int) -> Sequence[RoundsTime]:
    """One for each repeat."""
    rounds = RoundsAlone(num_sequences, num_drafts)
    for _ in range(num_steps // 4):
        rounds.step()

    def timed() -> RoundsTime:
        critical, other = rounds.critical_seconds, rounds.other_seconds
        for _ in range(num_steps):
            rounds.step()
        scale = 1e3 / num_steps
        return RoundsTime(scale * (rounds.critical_seconds - critical), scale * (rounds.other_seconds - other))

    return [timed() for _ in range(repeats)]
