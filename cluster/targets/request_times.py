"""Histograms of a target's requests and steps, with vLLM's names."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cluster.telemetry.metrics import LATENCY_BUCKETS, Reading, Tally

_STEP_TOKEN_BUCKETS = (1, *(2**power for power in range(3, 15)))
_PREEMPTION_BUCKETS = (1, 2, 3, 4, 5, 10, 20)  # buckets of vLLM's histogram
_PROMPT_TOKEN_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))


@dataclass(slots=True)
class _Request:
    admitted_at: float
    first_token_at: float | None = None


class RequestTimes:
    """Times between arrival, admission, first token and end of requests. Not thread-safe.

    In vLLM's terms, *prefill* lasts from admission to the first token, *decode* from the first token to the end, and
    *inference* from admission to the end.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._requests: dict[str, _Request] = {}  # running ones, by ID
        self._queue, self._prefill, self._decode, self._inference = (Tally(LATENCY_BUCKETS) for _ in range(4))
        self._preemptions = Tally(_PREEMPTION_BUCKETS)
        self._computed = Tally(_PROMPT_TOKEN_BUCKETS)
        self._step_tokens = Tally(_STEP_TOKEN_BUCKETS)

    def admitted(self, request_id: str, queue_seconds: float, num_uncached_tokens: int) -> None:
        """Records the first admission of a request, which waited `queue_seconds` at the target; ignores later ones."""
        if request_id in self._requests:
            return
        self._requests[request_id] = _Request(self._clock())
        self._queue.observe(queue_seconds)
        self._computed.observe(num_uncached_tokens)

    def committed(self, request_id: str) -> None:
        """Records that a step committed tokens of the request."""
        request = self._requests.get(request_id)
        if request is not None and request.first_token_at is None:
            request.first_token_at = self._clock()
            self._prefill.observe(request.first_token_at - request.admitted_at)

    def ended(self, request_id: str, num_preemptions: int) -> None:
        """Records the end of a request, for any reason."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._preemptions.observe(num_preemptions)
        if request is not None and request.first_token_at is not None:
            now = self._clock()
            self._decode.observe(now - request.first_token_at)
            self._inference.observe(now - request.admitted_at)

    def stepped(self, num_tokens: int) -> None:
        """Records a step that computed `num_tokens` tokens, drafts included."""
        self._step_tokens.observe(num_tokens)

    def readings(self) -> Iterator[Reading]:
        times = (
            ("queue", "from a sequence's arrival at the target to its admission", self._queue),
            ("prefill", "from a sequence's admission to its first token", self._prefill),
            ("decode", "from a sequence's first token to its end", self._decode),
            ("inference", "from a sequence's admission to its end", self._inference),
        )
        for name, what, tally in times:
            yield tally.reading(f"vllm:request_{name}_time_seconds", f"Time {what}.")
        preempted = "How many times a sequence was preempted."
        yield self._preemptions.reading("vllm:request_num_preemptions", preempted)
        uncached = "Tokens of admitted sequences that were not in the prefix cache."
        yield self._computed.reading("vllm:request_prefill_kv_computed_tokens", uncached)
        yield self._step_tokens.reading("vllm:iteration_tokens_total", "Tokens of a step, drafts included.")
