"""A client that gets comparable answers from any OpenAI-style server.

All servers get the same prompts, and generate the same number of tokens.
"""

from __future__ import annotations

import itertools
import ssl
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from services.event_stream import stream_events
from services.http_call import call

_ANSWER_SECONDS = 600.0  # timeout of an answer that is not streamed
_MAX_ANSWER_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """One answer with its times in seconds. Without streaming, both are of the whole answer."""

    num_tokens: int
    first_token_seconds: float  # since the request was sent
    last_token_seconds: float
    gaps: tuple[float, ...] = ()  # seconds between the pieces of the answer
    token_ids: tuple[int, ...] = ()  # if they were requested

    @property
    def token_gaps(self) -> list[float]:
        """Seconds between consecutive tokens; 0 for tokens of the same piece."""
        return [*self.gaps, *[0.0] * (self.num_tokens - 1 - len(self.gaps))]

    @property
    def seconds_between_tokens(self) -> float | None:
        """Mean seconds per token after the first; None if there is none."""
        if self.num_tokens < 2:
            return None
        return (self.last_token_seconds - self.first_token_seconds) / (self.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class RequestBurst:
    answers: Sequence[TimedAnswer]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return sum(answer.num_tokens for answer in self.answers) / self.seconds


def answer_all(
    url: str,
    model: str,
    prompts: Sequence[Sequence[int]],
    *,
    num_streams: int,
    temperature: float,
    max_tokens: int,
) -> RequestBurst:
    """Sends every prompt, `num_streams` at a time, and streams the answers. Raises ConfigurationError."""
    shared = {"model": model, "temperature": temperature, "max_tokens": max_tokens, "ignore_eos": True}
    bodies = [shared | {"prompt": list(prompt)} for prompt in prompts]
    return ask_all(url, bodies, num_streams=num_streams)


def ask_all(
    url: str,
    bodies: Sequence[dict[str, Any]],
    *,
    num_streams: int,
    path: str = "/v1/completions",
    is_streamed: bool = True,
    arrivals: Sequence[float] | None = None,
    context: ssl.SSLContext | None = None,
) -> RequestBurst:
    """Sends every request, `num_streams` at a time. Raises ConfigurationError.

    `arrivals`: for each request, seconds after the start at which it is sent, or later if no stream is free. An
    exception, also one of a signal handler, ends the wait at once; running requests continue until they are answered.
    """
    ask = _streamed if is_streamed else _whole

    def answer(body: dict[str, Any], arrival: float) -> TimedAnswer:
        time.sleep(max(0.0, started_at + arrival - time.perf_counter()))
        return ask(url, path, body, context)

    pool = ThreadPoolExecutor(num_streams)
    try:
        started_at = time.perf_counter()
        answers = list(pool.map(answer, bodies, arrivals or [0.0] * len(bodies)))
        return RequestBurst(answers, time.perf_counter() - started_at)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _streamed(url: str, path: str, body: dict[str, Any], context: ssl.SSLContext | None) -> TimedAnswer:
    asked_at = time.perf_counter()
    times: list[float] = []
    token_ids: list[int] = []
    num_tokens = 0
    for event in stream_events(url, path, body | {"stream_options": {"include_usage": True}}, context):
        if event.get("usage"):
            num_tokens = event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            own = choice.get("token_ids")
            token_ids += own or ()
            if own != []:  # if IDs are requested, a piece without IDs has no token
                times.append(time.perf_counter() - asked_at)
    gaps = tuple(after - before for before, after in itertools.pairwise(times))
    return TimedAnswer(num_tokens, times[0], times[-1], gaps, tuple(token_ids))


def _whole(url: str, path: str, body: dict[str, Any], context: ssl.SSLContext | None) -> TimedAnswer:
    asked_at = time.perf_counter()
    reply = call(url, "POST", path, body, seconds=_ANSWER_SECONDS, context=context, max_bytes=_MAX_ANSWER_BYTES)
    seconds = time.perf_counter() - asked_at
    token_ids = tuple(_token_ids(reply["choices"]))
    return TimedAnswer(reply["usage"]["completion_tokens"], seconds, seconds, token_ids=token_ids)


def _token_ids(choices: Sequence[dict[str, Any]]) -> Iterator[int]:
    for choice in choices:
        yield from choice.get("token_ids") or ()
