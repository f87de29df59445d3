"""Tests of draft workers as sidecars of each target under Ray."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil

from tests.system.conftest import PATIENT
from tests.system.ray.launched import END_SECONDS, SIMULATED, Launcher, answer, end_and_check, launched
from tests.waiting import eventually


def draft_programs(launcher: Launcher) -> list[psutil.Process]:
    found = []
    for process in launcher.descendants():
        try:
            arguments = process.cmdline()
        except psutil.Error:
            continue
        if "services.cli" in arguments and "draft" in arguments:
            found.append(process)
    return found


def test_they_draft_are_started_again_and_leave_nothing_behind(folder: Path) -> None:
    with launched(folder, *SIMULATED, "--set", "draft.placement=sidecar", "--set", PATIENT) as launcher:
        launcher.wait_ready()
        plain, drafted = answer(launcher, 0), answer(launcher, 4)
        assert drafted[0] == plain[0]
        assert (plain[1], drafted[1] > 0) == (0, True)
        (first,) = draft_programs(launcher)
        os.kill(first.pid, signal.SIGKILL)
        assert answer(launcher, 4)[0] == plain[0]
        assert eventually(lambda: answer(launcher, 4)[1] > 0 and draft_programs(launcher) != [first], END_SECONDS)
        end_and_check(launcher, folder)
