"""A drafter whose every step the test lets through, and a coordinator's side of a link to its worker."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

from cluster.drafters.base import Drafter, DraftSequence
from cluster.drafting.worker import DraftWorker
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.wire.messages import Advance, Open, Proposal, SpeculateReply, SpeculateRequest
from tests.waiting import WAIT_S

K, WINDOW = 3, 8


class ScriptedDrafter(Drafter):
    """Drafts `100 * first token + index`, at the end of every sequence or where it is told to; steps when it is let.

    A second child is 50 more than the first. A sequence is known by its first token.
    """

    num_used_blocks = 0
    num_blocks, block_size = 10, 16

    def __init__(self) -> None:
        self.max_model_len = 1000
        self.vocab_size = 100_000
        self.capacity = 8
        self.credit: int | None = None
        self.held: list[DraftSequence] = []
        self.without_room: set[int] = set()
        self.prompt_steps: dict[int, int] = {}  # that a sequence takes before it is drafted for
        self.rewinds: list[tuple[int, int]] = []
        self.failure: Exception | None = None
        self._asked: queue.Queue[list[int]] = queue.Queue()
        self._may_step = threading.Semaphore(0)
        self._is_let_always = False

    @property
    def free_tokens(self) -> int | None:
        return self.credit

    def admit(self, sequence: DraftSequence) -> bool:
        if len(self.held) == self.capacity:
            return False
        self.held.append(sequence)
        return True

    def draft(self, sequences: Sequence[DraftSequence]) -> list[DraftSequence]:
        self._asked.put([s.token_ids[0] for s in sequences])
        assert self._is_let_always or self._may_step.acquire(timeout=WAIT_S)
        if self.failure is not None:
            raise self.failure
        assert all(sequence in self.held for sequence in sequences)
        stuck = [s for s in sequences if s.token_ids[0] in self.without_room]
        for sequence in sequences:
            wire_id = sequence.token_ids[0]
            if self.prompt_steps.get(wire_id, 0):
                self.prompt_steps[wire_id] -= 1
            elif sequence not in stuck:
                for node in sequence.to_extend or [sequence.tip]:
                    best = 100 * sequence.token_ids[0] + sequence.num_committed + sequence.depth(node)
                    sequence.extend(node, [best, best + 50][: sequence.width], [0.0, 1.0][: sequence.width])
        return stuck

    def rewind(self, sequence: DraftSequence, kept: Sequence[int]) -> None:
        self.rewinds.append((sequence.token_ids[0], len(kept)))

    def release(self, sequence: DraftSequence) -> None:
        self.held.remove(sequence)

    # For the test.

    def next_step(self) -> list[int]:
        """Waits until the loop asks for a step, without letting it through. Returns the sequences of the step."""
        return self._asked.get(timeout=WAIT_S)

    def let(self) -> None:
        """Lets the step that was asked for through."""
        self._may_step.release()

    def step(self) -> list[int]:
        wire_ids = self.next_step()
        self.let()
        return wire_ids

    def let_all(self) -> None:
        """Lets this and all later steps through."""
        self._is_let_always = True
        self._may_step.release()

    def hold(self) -> None:
        """Makes each later step wait until it is let through."""
        self._is_let_always = False
        self._may_step = threading.Semaphore(0)

    @property
    def num_steps_asked(self) -> int:
        return self._asked.qsize()

    @property
    def wire_ids(self) -> set[int]:
        return {sequence.token_ids[0] for sequence in self.held}


class Link:
    """A coordinator's side of a link: what it sends, what it gets."""

    def __init__(self, worker: DraftWorker) -> None:
        self._worker = worker
        self.replies: queue.Queue[SpeculateReply] = queue.Queue()
        self.number = worker.attach(self.replies.put)

    def open(self, *wire_ids: int, k: int = K, length: int = 2, window: int = WINDOW) -> None:
        openings = {wire_id: opening(wire_id, k, length, window) for wire_id in wire_ids}
        self._worker.receive(self.number, SpeculateRequest(opens=openings))

    def advance(self, wire_id: int, base: int, *tokens: int, k: int = K) -> None:
        self._worker.receive(self.number, SpeculateRequest(advances={wire_id: Advance(wire_id, base, tokens, k)}))

    def close(self, *wire_ids: int) -> None:
        self._worker.receive(self.number, SpeculateRequest(closes=set(wire_ids)))

    def reply(self) -> SpeculateReply:
        return self.replies.get(timeout=WAIT_S)

    def detach(self) -> None:
        self._worker.detach(self.number)


def opening(wire_id: int, k: int = K, length: int = 2, window: int = WINDOW) -> Open:
    return Open(wire_id, [wire_id] * length, length, SamplingParams(), NoiseKey(0, 0), k, window)


def drafts(wire_id: int, start: int, count: int) -> list[int]:
    return [100 * wire_id + index for index in range(start, start + count)]


def proposal(wire_id: int, base: int, count: int = K) -> SpeculateReply:
    return SpeculateReply(proposals={wire_id: Proposal(wire_id, base, drafts(wire_id, base, count))})
