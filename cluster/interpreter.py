"""What the interpreter is told in every process in which an engine and its links have threads of their own."""

from __future__ import annotations

import sys

_SWITCH_INTERVAL_SECONDS = 0.0005


def switch_threads_soon() -> None:
    """Keeps threads from waiting for each other.

    The interpreter's own interval of 5 ms can outlast a whole round: the thread that takes a message from the network
    would wait that long for the engine's thread.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_SECONDS))
