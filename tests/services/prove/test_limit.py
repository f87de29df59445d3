"""The end of a measurement before it is complete."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from services.prove.limit import Stopped, TimeLimit

LONG = 30.0  # it is interrupted


def test_the_time_limit_interrupts_what_is_waited_for() -> None:
    with TimeLimit(0.1) as limit, pytest.raises(Stopped, match="the time limit of"):
        threading.Event().wait(LONG)
    assert limit.is_reached()
    assert limit.signum is None


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_interrupts_it(signum: signal.Signals) -> None:
    before = signal.getsignal(signum)
    with TimeLimit(LONG) as limit:
        threading.Timer(0.1, os.kill, (os.getpid(), signum)).start()
        with pytest.raises(Stopped, match=f"{signum.name} was received"):
            time.sleep(LONG)
    assert limit.signum == signum
    assert signal.getsignal(signum) is before


def test_nothing_is_raised_behind_a_shield_and_only_once_after_it() -> None:
    with TimeLimit(LONG) as limit:
        with limit.shielded():
            os.kill(os.getpid(), signal.SIGINT)
            while not limit.is_reached():
                time.sleep(0.01)
        with pytest.raises(Stopped, match="SIGINT"):
            limit.check()
        os.kill(os.getpid(), signal.SIGINT)
        limit.check()


def test_a_measurement_within_the_limit_is_not_interrupted() -> None:
    with TimeLimit(LONG) as limit:
        limit.check()
    assert not limit.is_reached()
