"""A streaming client that any OpenAI-style server answers alike: the same prompts, the same number of tokens."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True, slots=True)
class Answer:
    """One stream, times in seconds."""

    num_tokens: int
    first_token_seconds: float  # since it was asked for
    last_token_seconds: float
    gaps: tuple[float, ...]  # between the pieces of the answer

    @property
    def token_gaps(self) -> list[float]:
        """Between its tokens: those of one piece come together."""
        return [*self.gaps, *[0.0] * (self.num_tokens - 1 - len(self.gaps))]


@dataclass(frozen=True, slots=True)
class Burst:
    answers: Sequence[Answer]
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
    timeout: float = 600.0,
) -> Burst:
    """Every prompt, `num_streams` at a time. Raises httpx.HTTPError."""
    shared = {"model": model, "temperature": temperature, "max_tokens": max_tokens, "ignore_eos": True}
    bodies = [shared | {"prompt": list(prompt)} for prompt in prompts]
    return ask_all(url, bodies, num_streams=num_streams, timeout=timeout)


def ask_all(
    url: str,
    bodies: Sequence[dict[str, Any]],
    *,
    num_streams: int,
    path: str = "/v1/completions",
    timeout: float = 600.0,
    arrivals: Sequence[float] | None = None,
) -> Burst:
    """Every request, streamed, `num_streams` at a time. Raises httpx.HTTPError.

    `arrivals`: seconds after the beginning at which each is asked, if a stream is free then.
    """

    def ask(own: dict[str, Any], arrival: float) -> Answer:
        body = own | {"stream": True, "stream_options": {"include_usage": True}}
        time.sleep(max(0.0, started_at + arrival - time.perf_counter()))
        asked_at = time.perf_counter()
        times: list[float] = []
        num_tokens = 0
        with client.stream("POST", path, json=body) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if chunk.get("usage"):
                    num_tokens = chunk["usage"]["completion_tokens"]
                if chunk["choices"]:
                    times.append(time.perf_counter() - asked_at)
        gaps = tuple(b - a for a, b in itertools.pairwise(times))
        return Answer(num_tokens, times[0], times[-1], gaps)

    limits = httpx.Limits(max_connections=num_streams)
    with httpx.Client(base_url=url, timeout=timeout, limits=limits) as client, ThreadPoolExecutor(num_streams) as pool:
        started_at = time.perf_counter()
        answers = list(pool.map(ask, bodies, arrivals or [0.0] * len(bodies)))
        return Burst(answers, time.perf_counter() - started_at)
