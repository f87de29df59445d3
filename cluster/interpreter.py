"""Settings of the Python interpreter: thread switch interval and garbage collection."""

from __future__ import annotations

import gc
import sys

_SWITCH_INTERVAL_SECONDS = 0.0005
_GARBAGE_THRESHOLD = 10_000  # number of objects; the interpreter's default is 700


def switch_threads_soon() -> None:
    """Shortens the thread switch interval, so that threads wait less for each other.

    The interpreter's default of 5 ms can outlast a whole round: the thread that receives a message from the network
    would wait that long for the engine's thread.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_SECONDS))


def keep_collections_short() -> None:
    """Excludes the existing objects from garbage collection, and collects others less often. Call it after setup.

    A collection would otherwise visit the several hundred thousand objects of a program after setup. A step makes a few
    objects for each of its sequences, in a worker as in the router: at the default threshold of 700 the collector would
    run several times in every step.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GARBAGE_THRESHOLD, 10, 10)
