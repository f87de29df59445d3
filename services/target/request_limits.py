"""Measures requests against their limits of time: to the first token, and per output token after it.

`outrider_limit_ratio` is a histogram of measured time over limit, so the share of requests within limits is

    rate(outrider_limit_ratio_bucket{le="1.0"}[5m]) / rate(outrider_limit_ratio_count[5m])
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cluster.config import Config
from cluster.speculation.tuning import LIMIT_TOKENS
from cluster.telemetry.metrics import Reading, Tally
from protos.speculation.v1 import target_pb2

_RATIOS = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)
_MEANING = "Measured time of requests over its limit, by limit; the share up to 1 is that of requests within limits."


@dataclass(slots=True)
class _Request:
    started_at: float
    output_limit: float  # seconds; infinite: no limit
    has_first_limit: bool
    first_at: float = 0.0  # when its first tokens came
    num_tokens: int = 0  # tokens after the first
    last_at: float = 0.0


class RequestLimits:
    """Measures all requests of a target that have a limit. Belongs to one thread, except for `readings`."""

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self._first_limit = config.target.first_token_limit
        self._output_limit = config.speculation.output_limit
        self._clock = clock
        self._requests: dict[str, _Request] = {}
        self._ratios = {"first_token_ms": Tally(_RATIOS), "output_token_ms": Tally(_RATIOS)}

    def started(self, request_id: str, request: target_pb2.GenerateRequest) -> None:
        """Records the arrival of a request. One that another target began has no first token here."""
        limit = request.output_token_ms / 1e3 if request.HasField("output_token_ms") else self._output_limit
        has_first_limit = math.isfinite(self._first_limit) and not request.num_generated_tokens
        if has_first_limit or math.isfinite(limit):
            self._requests[request_id] = _Request(self._clock(), limit, has_first_limit)

    def committed(self, request_id: str, num_tokens: int) -> None:
        """Records that a step committed `num_tokens` tokens of the request."""
        request = self._requests.get(request_id)
        if request is None:
            return
        now = self._clock()
        if not request.first_at:
            request.first_at, num_tokens = now, num_tokens - 1
            if request.has_first_limit:
                self._ratios["first_token_ms"].observe((now - request.started_at) / self._first_limit)
        request.num_tokens += num_tokens
        request.last_at = now

    def ended(self, request_id: str) -> None:
        """Records the end of the request, for any reason."""
        request = self._requests.pop(request_id, None)
        if request is not None and request.num_tokens + 1 >= LIMIT_TOKENS and math.isfinite(request.output_limit):
            seconds = (request.last_at - request.first_at) / request.num_tokens
            self._ratios["output_token_ms"].observe(seconds / request.output_limit)

    def readings(self) -> Iterator[Reading]:
        """Any thread."""
        for limit, tally in self._ratios.items():
            *_, (_, count) = buckets = tally.buckets()
            yield Reading(
                "outrider_limit_ratio", _MEANING, count, labels={"limit": limit}, buckets=tuple(buckets), sum=tally.sum
            )
