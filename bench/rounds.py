"""The rounds alone, back to back in one thread: a coordinator and the codec, with a pool that answers at once.

What is left of a step's coordination when caches are warm and no thread has to be woken; used by `bench.coordination`.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

from cluster.config import SpeculationConfig
from cluster.coordination.coordinator import Coordinator
from cluster.coordination.link import DraftLink, LinkEvent, LinkState
from cluster.coordination.pool import DraftPool
from cluster.coordination.sequence import Round, SpeculativeSequence
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
    """Keeps the last request."""

    def __init__(self) -> None:
        self.request = SpeculateRequest()

    def send(self, request: SpeculateRequest) -> None:
        self.request = request


class _Pool:
    """Hands out what is put in."""

    def __init__(self) -> None:
        self.events: list[LinkEvent] = []

    def poll(self, timeout: float = 0.0) -> list[LinkEvent]:
        events, self.events = self.events, []
        return events


class RoundsAlone:
    def __init__(self, num_sequences: int, num_drafts: int) -> None:
        self._rng = random.Random(0)
        self._pool, self._link = _Pool(), _Link()
        config = SpeculationConfig(num_speculative_tokens=num_drafts, max_speculative_tokens=num_drafts)
        self._coordinator = Coordinator(
            cast(DraftPool, self._pool), config, VOCAB_SIZE, max_num_seqs=MAX_NUM_SEQS, max_num_rows=4096
        )
        for exponent in range(12):
            self._coordinator.planner.verify_seconds.observe(2**exponent, STEP_SECONDS)
        self._happens(LinkState.UP)
        self._sequences = [self._new_sequence(number) for number in range(num_sequences)]
        for sequence in self._sequences:
            self._coordinator.open(sequence)
        self.seconds = 0.0  # of the processor, of the step that is running or was the last

    def _new_sequence(self, number: int) -> SpeculativeSequence:
        tokens = [self._token() for _ in range(CONTEXT_LEN)]
        return SpeculativeSequence(tokens, CONTEXT_LEN, SamplingParams(), NoiseKey(number, 0), None)

    def _token(self) -> int:
        return self._rng.randrange(VOCAB_SIZE)

    def _happens(self, event: LinkState | SpeculateReply) -> None:
        answer_seconds = 6 * DRAFT_STEP_SECONDS
        self._pool.events.append(LinkEvent(cast(DraftLink, self._link), event, answer_seconds))

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started_at = time.thread_time()
        yield
        self.seconds += time.thread_time() - started_at

    def step(self) -> None:
        self.seconds, sequences = 0.0, self._sequences
        with self._timed():
            self._coordinator.flush(sequences)
            encode_request(self._link.request).ByteSize()
        payload = self._answer(self._link.request).SerializeToString()
        message = draft_pb2.SpeculateReply.FromString(payload)
        with self._timed():
            self._happens(decode_reply(message))
            self._coordinator.wait(sequences)
            drafts = self._coordinator.drafts(sequences)
        rounds = []
        for sequence, own in zip(sequences, drafts, strict=True):
            num_accepted = 0
            while num_accepted < len(own) and self._rng.random() < ACCEPTANCE:
                num_accepted += 1
            chosen = [*own.token_ids[:num_accepted], self._token()]
            cast(list[int], sequence.token_ids).extend(chosen)
            rounds.append(Round(sequence, own, chosen))
        num_rows = sum(len(own) + 1 for own in drafts)
        with self._timed():
            self._coordinator.commit(rounds)
            self._coordinator.observe_step(num_rows, STEP_SECONDS)

    def _answer(self, request: SpeculateRequest) -> draft_pb2.SpeculateReply:
        timing = Timing(5 * DRAFT_STEP_SECONDS, DRAFT_STEP_SECONDS, len(self._sequences))
        entries: list[Open | Advance] = [*request.opens.values(), *request.advances.values()]
        proposals = {entry.sequence: self._proposal(entry) for entry in entries}
        return encode_reply(SpeculateReply(proposals=proposals, timing=timing))

    def _proposal(self, entry: Open | Advance) -> Proposal:
        base = len(entry.token_ids) + (entry.base if isinstance(entry, Advance) else 0)
        return Proposal(entry.sequence, base, [self._token() for _ in range(entry.num_speculative_tokens)])


def time_rounds(num_sequences: int, num_drafts: int, num_steps: int, repeats: int) -> Sequence[float]:
    """Mean milliseconds of processor time of a step, for each repeat."""
    rounds = RoundsAlone(num_sequences, num_drafts)

    def timed_step() -> float:
        rounds.step()
        return rounds.seconds

    for _ in range(num_steps // 4):
        rounds.step()
    return [1e3 * statistics.fmean(timed_step() for _ in range(num_steps)) for _ in range(repeats)]
