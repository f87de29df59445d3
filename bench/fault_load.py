"""Load around a fault: streams that go on through it, and what each received and how long it waited."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httpx

Answers = dict[int, list[int]]  # by question

_PATIENCE_SECONDS = 30.0  # without a byte; then the request has failed
_ROUTER_PATIENCE_SECONDS = 4.0  # where routers fail: then the other is asked
_MAX_ASKED = 6


@dataclass(frozen=True, slots=True)
class Question:
    """A request that always has the same answer."""

    prompt: Sequence[int]
    seed: int
    max_tokens: int

    @property
    def body(self) -> dict[str, object]:
        return {
            "prompt": list(self.prompt),
            "seed": self.seed,
            "max_tokens": self.max_tokens,
            "temperature": 0.8,
            "frequency_penalty": 0.1,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }


@dataclass(slots=True)
class Tally:
    """Tally of all requests of a run."""

    num_sent: int = 0
    num_finished: int = 0
    num_asked_again: int = 0  # at the other router, after one had failed
    num_different_tokens: int = 0
    longest_pause: float = 0.0  # from the request to its first tokens, or between tokens
    errors: Counter[str] = field(default_factory=Counter)
    answers: Answers = field(default_factory=dict)

    @property
    def num_failed(self) -> int:
        return self.num_sent - self.num_finished


class Clients:
    """Clients, one for each of `questions`, which repeat it until `stop`, each at a router of its own first.

    With `may_change_router`, a client of a router that fails or falls silent repeats the request at the next router
    with the same seed. Without it, this is a failure.
    """

    def __init__(
        self,
        urls: Sequence[str],
        questions: Sequence[Question],
        expected: Answers | None,
        *,
        may_change_router: bool,
    ) -> None:
        self.tally = Tally()
        self._urls = urls
        self._questions = questions
        self._expected = expected
        self._may_change_router = may_change_router
        self._stopping = False

    async def run(self) -> None:
        """Sends requests until `stop`, and then waits for the answers that are still running."""
        await asyncio.gather(*(self._ask_on(index) for index in range(len(self._questions))))

    def stop(self) -> None:
        self._stopping = True

    async def _ask_on(self, index: int) -> None:
        patience = _ROUTER_PATIENCE_SECONDS if self._may_change_router else _PATIENCE_SECONDS
        async with httpx.AsyncClient(timeout=httpx.Timeout(patience)) as client:
            while True:
                await self._ask(client, index)
                if self._stopping:
                    return

    async def _ask(self, client: httpx.AsyncClient, index: int) -> None:
        self.tally.num_sent += 1
        asked_at = time.perf_counter()
        for attempt in range(_MAX_ASKED if self._may_change_router else 1):
            url = self._urls[(index + attempt) % len(self._urls)]
            try:
                answer = await self._stream(client, url, self._questions[index], asked_at)
            except (httpx.HTTPError, _EndedWithError) as error:
                what = str(error) or type(error).__name__
                asked_at = time.perf_counter()
                self.tally.num_asked_again += self._may_change_router
                await asyncio.sleep(0.1)
                continue
            self.tally.num_finished += 1
            self.tally.answers[index] = answer
            if self._expected is not None:
                self.tally.num_different_tokens += _num_different(answer, self._expected[index])
            return
        self.tally.errors[what] += 1

    async def _stream(self, client: httpx.AsyncClient, url: str, question: Question, asked_at: float) -> list[int]:
        token_ids: list[int] = []
        last = asked_at
        is_done = False
        async with client.stream("POST", f"{url}/v1/completions", json=question.body) as response:
            if response.status_code != 200:
                raise _EndedWithError(f"{response.status_code} {(await response.aread())[:200]!r}")
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    is_done = True
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise _EndedWithError(event["error"]["message"])
                now = time.perf_counter()
                self.tally.longest_pause = max(self.tally.longest_pause, now - last)
                last = now
                token_ids += event["choices"][0]["token_ids"]
        if not is_done:
            raise _EndedWithError("the stream ended early")
        return token_ids


class _EndedWithError(Exception):
    """Raised if an answer ends with an error or is incomplete."""


def _num_different(answer: Sequence[int], expected: Sequence[int]) -> int:
    differing = sum(token != wanted for token, wanted in zip(answer, expected, strict=False))
    return differing + abs(len(answer) - len(expected))


@dataclass(frozen=True, slots=True)
class Row:
    """Results of one fault."""

    fault: str
    victim: str
    num_sent: int
    num_finished: int
    num_failed: int
    num_asked_again: int
    num_different_tokens: int
    longest_pause: float
    note: str = ""


def make_questions(num_streams: int, max_tokens: int) -> list[Question]:
    return [
        Question([3 + (97 * index + place) % 4000 for place in range(40)], index, max_tokens)
        for index in range(num_streams)
    ]


def under_load(
    urls: Sequence[str],
    questions: Sequence[Question],
    expected: Answers | None,
    act: Callable[[], str],
    lead: float,
    *,
    may_change_router: bool = False,
) -> tuple[Tally, str]:
    """Runs streams before, during and after `act`. Returns their tally and the note that `act` returns.

    The streams run for `lead` seconds before `act` and for `lead` seconds after it.
    """
    clients = Clients(urls, questions, expected, may_change_router=may_change_router)
    # They have a thread of their own: a program ends with the thread that started it, so this one does that.
    running = threading.Thread(target=lambda: asyncio.run(clients.run()))
    running.start()
    try:
        time.sleep(lead)
        note = act()
        time.sleep(lead)
    finally:
        clients.stop()
        running.join()
    return clients.tally, note


def row_of(fault: str, victim: str, tally: Tally, note: str) -> Row:
    errors = "; ".join(f"{count} x {what}" for what, count in tally.errors.most_common(2))
    return Row(
        fault,
        victim,
        tally.num_sent,
        tally.num_finished,
        tally.num_failed,
        tally.num_asked_again,
        tally.num_different_tokens,
        round(tally.longest_pause, 2),
        " ".join(filter(None, (note, errors))),
    )


def print_head() -> None:
    print("| fault | victim | sent | finished | failed | asked again | different tokens | longest pause s | |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")


def print_row(row: Row) -> None:
    cells = [str(getattr(row, name)) for name in Row.__slots__]
    print(f"| {' | '.join(cells)} |", flush=True)
