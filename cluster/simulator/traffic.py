"""Traffic: arrival times and lengths of requests."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cluster.errors import ConfigurationError

# Larger values are mistakes: a run with them would not end.
_MAX_SECONDS = 31_622_400.0  # a year
_MAX_REQUESTS = 100_000_000
_MAX_STREAMS = 1_000_000
_MAX_TOKENS = 1_000_000  # tokens of a prompt or an answer; each is held in memory
_MIN_BURSTINESS, _MAX_BURSTINESS = 1e-3, 1e3
_MAX_QUOTED = 40  # characters of the user's text
_FIELDS = ("arrival_seconds", "prompt_tokens", "answer_tokens")


@dataclass(frozen=True, slots=True)
class Arrival:
    seconds: float  # since the start
    prompt_tokens: int
    answer_tokens: int
    token_ids: Sequence[int] = ()  # the prompt; (): tokens that no other request shares


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that has ended, at times in seconds since the start."""

    arrival: Arrival
    ended_at: float
    first_token_at: float = math.nan
    token_ids: Sequence[int] = ()
    target: int = 0  # index of the target that answered
    num_cached_tokens: int = 0  # tokens of the prompt that were in the target's prefix cache


class Traffic(Protocol):
    """Requests in the order of their arrival."""

    def arrivals(self) -> Iterator[Arrival]:
        """Yields the requests that do not depend on answers."""

    def after(self, answer: EndedRequest) -> Arrival | None:
        """Returns the request that the client sends after `answer`; None if it sends no further request."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of prompts or answers, uniformly distributed from `least` to `most`."""

    least: int
    most: int

    def __post_init__(self) -> None:
        if self.most > _MAX_TOKENS:
            raise ConfigurationError(f"lengths of more than {_MAX_TOKENS:,} tokens: write fewer")
        if not 1 <= self.least <= self.most:
            raise ConfigurationError(f"lengths of {self.least} to {self.most} tokens: write 1 or more, the least first")

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Parses `N` or `LEAST:MOST`. Raises ConfigurationError."""
        least, colon, most = text.partition(":")
        try:
            return cls(int(least), int(most if colon else least))
        except ValueError:
            raise ConfigurationError(f"{text[:_MAX_QUOTED]!r} is no number of tokens: write N or LEAST:MOST") from None

    @property
    def mean(self) -> float:
        return (self.least + self.most) / 2

    def draw(self, rng: np.random.Generator) -> int:
        return int(rng.integers(self.least, self.most + 1))


class OpenTraffic:
    """Requests at a random rate: independent of each other (Poisson), or in bursts.

    The times between two requests are gamma-distributed with shape `1 / burstiness`. With a burstiness of 1 this is the
    exponential distribution; with 4 its standard deviation is twice as large.
    """

    def __init__(
        self,
        requests_per_second: float,
        seconds: float,
        prompts: Lengths,
        answers: Lengths,
        seed: int,
        burstiness: float = 1.0,
    ) -> None:
        is_bounded = seconds <= _MAX_SECONDS and requests_per_second * seconds <= _MAX_REQUESTS
        if not (requests_per_second > 0 and seconds > 0 and is_bounded):
            raise ConfigurationError(
                f"{requests_per_second:g} requests a second for {seconds:g} s: both must be above 0, and make "
                f"{_MAX_REQUESTS:,} requests within {_MAX_SECONDS:,.0f} s (a year) at most"
            )
        # Beyond these limits floating-point numbers fail: all requests would arrive at once, or never.
        if not _MIN_BURSTINESS <= burstiness <= _MAX_BURSTINESS:
            raise ConfigurationError(
                f"burstiness {burstiness:g}: write one from {_MIN_BURSTINESS:g} to {_MAX_BURSTINESS:g}"
            )
        self._rate, self._seconds, self._burstiness = requests_per_second, seconds, burstiness
        self._prompts, self._answers, self._seed = prompts, answers, seed

    def arrivals(self) -> Iterator[Arrival]:
        rng, now = np.random.default_rng(self._seed), 0.0
        while True:
            now += rng.gamma(1.0 / self._burstiness, self._burstiness / self._rate)
            if now >= self._seconds:
                return
            yield Arrival(now, self._prompts.draw(rng), self._answers.draw(rng))

    def after(self, answer: EndedRequest) -> Arrival | None:
        return None


class ClosedTraffic:
    """Streams that send their next request when the last is answered, until `seconds`.

    The streams start evenly distributed over `ramp_seconds`.
    """

    def __init__(
        self,
        num_streams: int,
        seconds: float,
        prompts: Lengths,
        answers: Lengths,
        seed: int,
        ramp_seconds: float = 0.0,
    ) -> None:
        if not (1 <= num_streams <= _MAX_STREAMS and 0 < seconds <= _MAX_SECONDS and 0 <= ramp_seconds <= seconds):
            raise ConfigurationError(
                f"{num_streams} streams for {seconds:g} s, started over {ramp_seconds:g} s: set 1 to {_MAX_STREAMS:,} "
                f"streams, {_MAX_SECONDS:,.0f} s (a year) at most, and a beginning from 0 s to all of them"
            )
        self._num_streams, self._seconds, self._ramp_seconds = num_streams, seconds, ramp_seconds
        self._prompts, self._answers = prompts, answers
        self._rng = np.random.default_rng(seed)

    def arrivals(self) -> Iterator[Arrival]:
        for number in range(self._num_streams):
            yield self._at(self._ramp_seconds * number / self._num_streams)

    def after(self, answer: EndedRequest) -> Arrival | None:
        return self._at(answer.ended_at) if answer.ended_at < self._seconds else None

    def _at(self, seconds: float) -> Arrival:
        return Arrival(seconds, self._prompts.draw(self._rng), self._answers.draw(self._rng))


class RecordedTraffic:
    """Recorded requests, sorted by arrival."""

    def __init__(self, requests: list[Arrival]) -> None:
        self._requests = sorted(requests, key=lambda request: request.seconds)

    @property
    def seconds(self) -> float:
        """Time of the last arrival, in seconds."""
        return self._requests[-1].seconds

    @property
    def mean_context(self) -> float:
        """Mean length of a sequence while it decodes, over all generated tokens."""
        num_tokens = sum(request.answer_tokens for request in self._requests)
        return sum(r.answer_tokens * (r.prompt_tokens + r.answer_tokens / 2) for r in self._requests) / num_tokens

    @classmethod
    def read(cls, file: Path) -> RecordedTraffic:
        """Reads JSON lines with `arrival_seconds`, `prompt_tokens` and `answer_tokens`; ignores other fields.

        Raises ConfigurationError.
        """
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"the trace {file} cannot be read: {error}") from error
        requests = [_parse(line, f"{file}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
        if not requests:
            raise ConfigurationError(f"the trace {file} has no requests: write one JSON object a line")
        return cls(requests)

    def arrivals(self) -> Iterator[Arrival]:
        return iter(self._requests)

    def after(self, answer: EndedRequest) -> Arrival | None:
        return None


def _parse(line: str, place: str) -> Arrival:
    try:
        entry: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{place}: {error}") from error
    missing = [name for name in _FIELDS if not isinstance(entry, dict) or name not in entry]
    if missing:
        raise ConfigurationError(f"{place}: {', '.join(missing)} missing: each line is an object with {_FIELDS}")
    seconds, prompt, answer = (entry[name] for name in _FIELDS)
    if not (_is_number(seconds) and 0 <= seconds <= _MAX_SECONDS):
        raise ConfigurationError(
            f"{place}: arrival_seconds is {_quoted(seconds)}: write a number from 0 to {_MAX_SECONDS:,.0f} (a year)"
        )
    for name, value in (("prompt_tokens", prompt), ("answer_tokens", answer)):
        if type(value) is not int or not 1 <= value <= _MAX_TOKENS:
            raise ConfigurationError(
                f"{place}: {name} is {_quoted(value)}: write a whole number from 1 to {_MAX_TOKENS:,}"
            )
    return Arrival(float(seconds), prompt, answer)


def _quoted(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}..."


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
