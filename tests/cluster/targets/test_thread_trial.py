"""A target with more threads than cores tells what that costs it."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from cluster.targets.thread_trial import ThreadTrial

from .loopback import LoopbackTarget
from .requests import new_request


def test_an_eighth_of_the_steps_have_a_thread_a_core() -> None:
    threads = 8
    set_to: list[int] = []

    def set_num_threads(num_threads: int) -> None:
        nonlocal threads
        threads = num_threads
        set_to.append(num_threads)

    trial = ThreadTrial(["decode"], 8, 2, set_num_threads)
    had = []
    for _ in range(640):
        trial.begin()
        had.append(threads)
        trial.add("decode", 1.0 if threads == 2 else 3.0)
    assert had.count(2) == 80
    assert len(set_to) == 19  # there and back, in each of ten cycles but the last
    told = {reading.name: reading.value for reading in trial.readings()}
    # Without the first of each time.
    assert told == {"outrider_fitting_steps": 70, "outrider_fitting_step_seconds": 70.0}


def test_a_target_tries_them_and_changes_no_token(new_target: Callable[..., LoopbackTarget]) -> None:
    before = torch.get_num_threads()
    answers = []
    try:
        for num_threads, tries in ((len(os.sched_getaffinity(0)) + 2, True), (len(os.sched_getaffinity(0)), False)):
            torch.set_num_threads(num_threads)
            target = new_target([])
            answers += target.generate([new_request(max_tokens=100, k=0)])
            tried = [one.value for one in target.target.readings() if one.name == "outrider_fitting_steps"]
            assert bool(sum(tried)) is tries
    finally:
        torch.set_num_threads(before)
    assert answers[0] == answers[1]
