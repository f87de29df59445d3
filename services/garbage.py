"""How often a program's garbage is collected."""

from __future__ import annotations

import gc

_THRESHOLD = 10_000


def keep_collections_short() -> None:
    """Leaves what is there by now out of them, some hundred thousand objects, and looks at the rest less often.

    A step makes a few objects for each of its sequences, in a worker as in the router: at the default threshold of 700
    the collector would run several times in every step.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_THRESHOLD, 10, 10)
