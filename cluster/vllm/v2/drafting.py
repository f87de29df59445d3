"""Rounds of one vLLM engine's requests, without vLLM: the interface that its speculator calls.

add, add, ...; opened()     Before a step: opens the requests, so drafters compute prompts during the target's prefill.
... = after_step(stepped)   After a step: takes the sampled tokens, and returns the drafts for the next step.
remove                      Whenever a request finishes, or is aborted or preempted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.coordination.coordinator import Coordinator
from cluster.coordination.sequence import NO_DRAFTS, Round, SpeculativeSequence
from cluster.speculation.drafts import Drafts
from cluster.telemetry.metrics import Reading
from cluster.vllm.coupling import Coupling


class Stepped(NamedTuple):
    """One request's part of a step."""

    request_id: str
    token_ids: Sequence[int]  # sampled tokens; empty while the prompt is computed
    num_verified: int  # draft tokens that the step verified


@dataclass(slots=True)
class _Running:
    sequence: SpeculativeSequence
    token_ids: list[int]  # the token list of `sequence`, which grows here
    drafts: Drafts = field(default_factory=Drafts)  # the drafts that the next step verifies
    is_decoding: bool = False


class RemoteDrafting:
    """Rounds of one engine's requests. Belongs to the engine's thread."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._running: dict[str, _Running] = {}
        self._num_rounds = self._num_draft_tokens = self._num_accepted_tokens = 0

    def add(
        self, request_id: str, token_ids: Sequence[int], num_prompt_tokens: int, max_len: int, coupling: Coupling
    ) -> None:
        """Adds a request that runs from the next step on.

        If the request was preempted before, `token_ids` includes its generated tokens.
        """
        own = list(token_ids)
        sequence = SpeculativeSequence(
            own, num_prompt_tokens, coupling.params, coupling.noise_key, coupling.num_speculative_tokens, max_len
        )
        self._running[request_id] = _Running(sequence, own)

    def opened(self) -> None:
        """Opens the added requests on draft workers. Also handles workers that went up or down in the meantime."""
        self._coordinator.begin((), self._joining())

    def remove(self, request_id: str) -> None:
        running = self._running.pop(request_id, None)
        if running is None:
            return
        self._coordinator.close(running.sequence)
        if not self._running:  # the next step would notify the drafter, but may be far away
            self._coordinator.end(())

    def after_step(self, stepped: Sequence[Stepped]) -> dict[str, Sequence[int]]:
        """Returns the drafts for the next step, by request ID. Waits at most the draft timeout for them."""
        rounds: list[Round] = []
        decoding: dict[str, _Running] = {}
        for request_id, token_ids, num_verified in stepped:
            running = self._running.get(request_id)
            if running is None or not token_ids:
                continue
            running.is_decoding = True
            decoding[request_id] = running
            running.token_ids.extend(token_ids)
            drafts = running.drafts.first(num_verified)
            # Tokens that only pad a step may be accepted too. They do not count as drafts.
            rounds.append(Round(running.sequence, drafts, token_ids[: len(drafts) + 1]))
            self._count(rounds[-1])
        joining = self._joining()
        self._coordinator.end(rounds, joining=joining)
        found = self._coordinator.begin([running.sequence for running in decoding.values()], joining)
        for running in decoding.values():
            running.drafts = found.get(running.sequence, NO_DRAFTS)
        return {request_id: running.drafts.token_ids for request_id, running in decoding.items()}

    def readings(self) -> Iterator[Reading]:
        """Yields metrics of drafts and those of the coordinator. Thread-safe."""
        for name, documentation, value in (
            ("drafts", "Rounds that verified a draft.", self._num_rounds),
            ("draft_tokens", "Draft tokens verified, without those that only fill a step up.", self._num_draft_tokens),
            ("accepted_tokens", "Draft tokens accepted.", self._num_accepted_tokens),
        ):
            yield Reading(f"vllm:spec_decode_num_{name}", documentation, value, is_counter=True)
        yield from self._coordinator.readings()

    def _joining(self) -> list[SpeculativeSequence]:
        return [running.sequence for running in self._running.values() if not running.is_decoding]

    def _count(self, ended: Round) -> None:
        if ended.drafts.token_ids:
            self._num_rounds += 1
            self._num_draft_tokens += len(ended.drafts)
            self._num_accepted_tokens += len(ended.chosen) - 1
