"""What a target times before its first request."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.waiting import wait_until

from .loopback import LoopbackTarget


@pytest.fixture
def more_threads_than_cores() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)) + 2)
    yield
    torch.set_num_threads(before)


TOLD = ("1", "2", "4", "8", "16")


def timed(target: LoopbackTarget) -> set[tuple[str, str]]:
    """By whose threads, and of how many rows."""
    return {
        (reading.labels["threads"], reading.labels["rows"])
        for reading in target.target.readings()
        if reading.name == "outrider_start_step_seconds"
    }


def test_steps_as_it_is(new_target: Callable[..., LoopbackTarget]) -> None:
    target = new_target([])
    wait_until(lambda: bool(timed(target)))
    assert timed(target) == {("own", rows) for rows in TOLD}


def test_and_with_a_thread_a_core_where_there_are_more(
    more_threads_than_cores: None, new_target: Callable[..., LoopbackTarget]
) -> None:
    num_threads = torch.get_num_threads()
    target = new_target([])
    wait_until(lambda: bool(timed(target)))
    assert timed(target) == {(threads, rows) for threads in ("own", "fitting") for rows in TOLD}
    assert torch.get_num_threads() == num_threads
