"""Fewer and shorter runs of Python's garbage collector."""

from __future__ import annotations

import gc

_THRESHOLD = 10_000


def keep_collections_short() -> None:
    """To be called when a program is set up: excludes the objects that exist now, and collects the others less often.

    A collection would visit the some hundred thousand objects of a program that has been set up. And a step makes a few
    objects for each of its sequences, in a worker as in the router: at the default threshold of 700 the collector would
    run several times in every step.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_THRESHOLD, 10, 10)
