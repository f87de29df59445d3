"""Settings of the Python interpreter: how soon threads switch, and when garbage is collected."""

from __future__ import annotations

import gc
import sys

_SWITCH_INTERVAL_SECONDS = 0.0005
_GARBAGE_THRESHOLD = 10_000  # number of objects; the interpreter's default is 700


def switch_threads_soon() -> None:
    """Keeps threads from waiting for each other.

    The interpreter's own interval of 5 ms can outlast a whole round: the thread that takes a message from the network
    would wait that long for the engine's thread.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_SECONDS))


def keep_collections_short() -> None:
    """To be called when a program is set up: excludes the objects that exist now, and collects the others less often.

    A collection would visit the some hundred thousand objects of a program that has been set up. And a step makes a few
    objects for each of its sequences, in a worker as in the router: at the default threshold of 700 the collector would
    run several times in every step.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GARBAGE_THRESHOLD, 10, 10)
