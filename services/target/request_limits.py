"""Measures requests against their limits of time: to the first token, and per output token after it.

`outrider_limit_ratio` is a histogram of measured time over limit, so the share of requests within limits is

    rate(outrider_limit_ratio_bucket{le="1.0"}[5m]) / rate(outrider_limit_ratio_count[5m])

The same measurements predict whether a request would miss the configured limits (`target.refuse_late`): times to the
first token over the prompt tokens that waited at arrival, and times per output token over the requests that ran at
arrival. Requests with a limit or a k of their own have other times per token: they do not count there, and are not
refused for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cluster.config import Config
from cluster.errors import OverloadedError
from cluster.speculation.answer_time import Z99
from cluster.speculation.line_fit import LineFit
from cluster.speculation.tuning import CLIP, KEEP, LIMIT_TOKENS, PRIOR
from cluster.telemetry.metrics import Reading, Tally
from protos.speculation.v1 import target_pb2

_RATIOS = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)
_LIMITS = ("first_token_ms", "output_token_ms")
MIN_WAITING_TOKENS = 256  # of a request: it takes at most the memory of this many tokens in addition to its own
_MEANING = "Measured time of requests over its limit, by limit; the share up to 1 is that of requests within limits."


@dataclass(slots=True)
class _Request:
    started_at: float
    output_limit: float  # seconds; infinite: no limit
    has_first_limit: bool
    is_typical: bool  # it has neither a limit of its own nor a k
    num_waiting_tokens: int  # prompt tokens that waited at its arrival, including its own
    num_running: int  # requests at its arrival, including itself
    has_measured_limit: bool = False  # a time of it was compared with a configured limit
    is_late: bool = False  # and was over it
    first_at: float = 0.0  # when its first tokens came
    num_tokens: int = 0  # tokens after the first
    last_at: float = 0.0


class _Trend:
    """A line of times over a load, and their deviation from it: least squares, in which older times lose weight.

    Loads that differ by less than `unit` tell nothing about the slope.
    """

    def __init__(self, unit: float) -> None:
        self.latest = 0.0  # seconds
        self._square = unit * unit
        self._fit = LineFit(KEEP)  # of seconds over the load

    def observe(self, load: float, seconds: float, limit: float) -> None:
        if self._fit.weight >= PRIOR:
            expected = self.p99(load)
            if seconds <= limit < expected:  # such requests are refused without need: newer times count more
                self._fit.weight = PRIOR
            # A single stall must not count for long.
            seconds = min(seconds, CLIP * max(expected, self._fit.mean_y))
        self.latest = seconds
        self._fit.observe(load, seconds)

    def p99(self, load: float) -> float:
        """Returns the predicted p99 of the seconds at `load`, if they are normal; 0 before the first measurements."""
        fit = self._fit
        if fit.weight < PRIOR:
            return 0.0
        slope = max(0.0, fit.covariance) / (fit.variance_x + self._square)
        variance = max(0.0, fit.variance_y - slope * fit.covariance)
        return fit.mean_y + slope * (load - fit.mean_x) + Z99 * math.sqrt(variance)


class RequestLimits:
    """Measures all requests of a target that have a limit. Belongs to one thread, except for `readings`."""

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self._first_limit = config.target.first_token_limit
        self._output_limit = config.speculation.output_limit
        self._refuses_late = config.target.refuse_late
        self._clock = clock
        self._first_seconds, self._output_seconds = _Trend(MIN_WAITING_TOKENS), _Trend(1.0)
        self._accepted_at = -math.inf  # when the last request was accepted
        self._num_refused = dict.fromkeys(_LIMITS, 0)
        self._requests: dict[str, _Request] = {}
        self._ratios = {limit: Tally(_RATIOS) for limit in _LIMITS}
        # Requests that were compared with a configured limit, and those over one. A refusal is one over. Limits that
        # requests set are left out: otherwise a client could make the pool grow.
        self.num_limited = self.num_late = 0

    def started(
        self, request_id: str, request: target_pb2.GenerateRequest, num_waiting_tokens: int, num_running: int
    ) -> None:
        """Records the arrival of a request. One that another target began has no first token here.

        `num_waiting_tokens`, `num_running`: prompt tokens that wait, and requests, including this one. Raises
        OverloadedError if the request would miss a limit, late requests are refused, and it is not the only one. Other
        choices of an accepted request are accepted.
        """
        has_own = request.HasField("output_token_ms")
        limit = request.output_token_ms / 1e3 if has_own else self._output_limit
        is_new = not request.num_generated_tokens
        is_typical = not (has_own or request.HasField("num_speculative_tokens"))
        if self._refuses_late and is_new and num_running > 1 and not request.choice_index:
            self._refuse_late(num_waiting_tokens, num_running if is_typical else 0)
        self._accepted_at = self._clock()
        has_first_limit = math.isfinite(self._first_limit) and is_new
        if has_first_limit or math.isfinite(limit):
            self._requests[request_id] = _Request(
                self._accepted_at, limit, has_first_limit, is_typical, num_waiting_tokens, num_running
            )

    def _refuse_late(self, num_waiting_tokens: int, num_running: int) -> None:
        """Raises OverloadedError if a request at this load would miss a configured limit.

        Accepts one if none was accepted for the latest measured time, so that a wrong prediction does not last.
        """
        first, output = self._first_seconds, self._output_seconds
        idle_seconds = self._clock() - self._accepted_at
        predicted = first.p99(num_waiting_tokens)
        if predicted > self._first_limit and idle_seconds < max(self._first_limit, first.latest):
            self._refused("first_token_ms")
            raise OverloadedError(f"the first token would come after {predicted:.3g} s, of {self._first_limit:g} s")
        predicted = output.p99(num_running) if num_running else 0.0
        if predicted > self._output_limit and idle_seconds < LIMIT_TOKENS * max(self._output_limit, output.latest):
            self._refused("output_token_ms")
            raise OverloadedError(f"an output token would take {predicted:.3g} s, of {self._output_limit:g} s")

    def _refused(self, limit: str) -> None:
        self._num_refused[limit] += 1
        self._count(is_late=True)

    def _count(self, *, is_late: bool) -> None:
        self.num_limited += 1
        self.num_late += is_late

    def committed(self, request_id: str, num_tokens: int) -> None:
        """Records that a step committed `num_tokens` tokens of the request."""
        request = self._requests.get(request_id)
        if request is None:
            return
        now = self._clock()
        if not request.first_at:
            request.first_at, num_tokens = now, num_tokens - 1
            if request.has_first_limit:
                seconds = now - request.started_at
                self._first_seconds.observe(request.num_waiting_tokens, seconds, self._first_limit)
                self._ratios["first_token_ms"].observe(seconds / self._first_limit)
                request.has_measured_limit = True
                request.is_late = seconds > self._first_limit
        request.num_tokens += num_tokens
        request.last_at = now

    def ended(self, request_id: str) -> None:
        """Records the end of the request, for any reason."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        if request.num_tokens + 1 >= LIMIT_TOKENS and math.isfinite(request.output_limit):
            seconds = (request.last_at - request.first_at) / request.num_tokens
            if request.is_typical:
                self._output_seconds.observe(request.num_running, seconds, self._output_limit)
                request.has_measured_limit = True
                request.is_late |= seconds > self._output_limit
            self._ratios["output_token_ms"].observe(seconds / request.output_limit)
        if request.has_measured_limit:
            self._count(is_late=request.is_late)

    def readings(self) -> Iterator[Reading]:
        """Any thread."""
        for limit, tally in self._ratios.items():
            *_, (_, count) = buckets = tally.buckets()
            yield Reading(
                "outrider_limit_ratio", _MEANING, count, labels={"limit": limit}, buckets=tuple(buckets), sum=tally.sum
            )
            refused = "Requests that were refused because they would have missed a limit, by limit."
            number = self._num_refused[limit]
            yield Reading("outrider_late_refusals", refused, number, labels={"limit": limit}, is_counter=True)
        limited = "Requests that were compared with a configured limit; a refusal of a late request counts as one."
        yield Reading("outrider_limited_requests", limited, self.num_limited, is_counter=True)
        late = "Requests over a configured limit; a refusal of a late request counts as one."
        yield Reading("outrider_late_requests", late, self.num_late, is_counter=True)
