"""Rounds whose drafts the model runner makes itself, on the target's device. The host never reads these drafts.

The host only decides their number: `next_depth` chooses it when a step is scheduled. At the end of the step the runner
drafts this number of tokens for all sequences of the step, to verify in the next step. After a step without drafting,
the draft model's cache lacks the tokens of that step. The drafts of its sequences would be poor, so these sequences get
no more drafts, and a step in which all sequences lack tokens drafts nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from vllm.v1.request import Request

from cluster.speculation.acceptance_model import SequenceAcceptance
from cluster.speculation.device_depths import DeviceDepths
from cluster.speculation.tuning import TRIAL_DEPTHS, TRIAL_REPEATS
from cluster.vllm.constraints import is_constrained
from cluster.vllm.core.scheduler import EngineStep, Rounds
from cluster.vllm.coupling import Coupling

TRIED_STEPS = TRIAL_REPEATS * len(TRIAL_DEPTHS)


@dataclass(slots=True)
class _Sequence:
    acceptance: SequenceAcceptance
    asked: int | None  # drafts per step that the request set; None: the chosen depth
    num_drafted: int = 0  # drafts made at the end of its last step
    is_whole: bool = True  # whether the draft model's cache has all tokens of the sequence


class DeviceRounds(Rounds):
    """Rounds for a runner that drafts. A depth of 0 drafts nothing in that step."""

    def __init__(self, max_depth: int, initial_depth: int, *, is_fixed: bool) -> None:
        """`is_fixed`: the depth is always `initial_depth`, except for requests that set their own."""
        self._depths = DeviceDepths(max_depth, initial_depth)
        self._max_depth = max_depth
        self._is_fixed = is_fixed
        self._chosen = initial_depth
        self._scheduled: deque[int] = deque()  # depths of the steps in flight
        self._sequences: dict[str, _Sequence] = {}
        self._is_trying = True
        self._num_tried = 0

    def tried(self) -> None:
        """Ends the trial steps before the first request."""
        self._depths.tried()
        self._is_trying = False

    def next_depth(self, requests: Iterable[Request]) -> int:
        """Returns the number of drafts to make in the next scheduled step. `requests`: running and waiting requests."""
        if self._is_trying:
            self._num_tried += 1
            return min(TRIAL_DEPTHS[self._num_tried % len(TRIAL_DEPTHS)], self._max_depth)
        sequences = [self._sequence(request) for request in requests]
        free = [sequence.acceptance for sequence in sequences if sequence.asked is None]
        if free and not self._is_fixed:
            self._chosen = self._depths.next_depth(free)
        return max((self._depth(sequence) for sequence in sequences if sequence.is_whole), default=0)

    def ran(self, requests: Iterable[Request], depth: int) -> None:
        """Records a scheduled step of `requests` that makes `depth` drafts for each."""
        self._scheduled.append(depth)
        for request in requests:
            sequence = self._sequence(request)
            sequence.num_drafted = depth
            sequence.is_whole &= depth > 0 or self._is_trying

    def plan(self, decoding: Sequence[Request], joining: Sequence[Request]) -> Mapping[str, int]:
        planned = {}
        for request in decoding:
            sequence = self._sequence(request)
            wanted = self._max_depth if self._is_trying else self._depth(sequence)
            planned[request.request_id] = min(wanted, sequence.num_drafted) if sequence.is_whole else 0
        return planned if any(planned.values()) else {}

    def end(self, step: EngineStep) -> None:
        depth = self._scheduled.popleft()
        if step.rounds and not step.prompts:
            self._depths.observe(step.num_rows, depth, step.seconds)
        if self._is_trying:
            return
        for committed in step.rounds:
            sequence = self._sequences.get(committed.request.request_id)
            if sequence is not None and committed.draft_token_ids:
                sequence.acceptance.observe(len(committed.draft_token_ids), committed.num_accepted)

    def close(self, request: Request) -> None:
        self._sequences.pop(request.request_id, None)

    def _depth(self, sequence: _Sequence) -> int:
        return min(self._chosen if sequence.asked is None else sequence.asked, self._max_depth)

    def _sequence(self, request: Request) -> _Sequence:
        sequence = self._sequences.get(request.request_id)
        if sequence is None:
            params = request.sampling_params
            coupling = Coupling.of(params)
            temperature = 0.0 if coupling is None else coupling.params.temperature
            asked = None if coupling is None else coupling.num_speculative_tokens
            if is_constrained(params):
                asked = 0  # masks are made on the host, which never has the drafts that they depend on
            sequence = self._sequences[request.request_id] = _Sequence(self._depths.acceptance(temperature), asked)
        return sequence
