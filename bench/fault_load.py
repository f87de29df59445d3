"""Load around a fault, and measurements of the streams during it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.fault_client import Clients, Question, Tally

Answers = dict[int, list[int]]  # by question


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
