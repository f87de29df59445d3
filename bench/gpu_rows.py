"""What checks on a GPU have in common: a row of their table, times, and the size of the pair that is timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

PAIR_WIDTH_FACTOR, PAIR_INTERMEDIATE_SIZE = 16, 32_768  # of the bundled target, for `bench.models`: 4.2B parameters


@dataclass(slots=True)
class Row:
    check: str
    held: bool | None  # None: figures, which nothing is asked of
    seen: str
    figures: dict[str, Any] = field(default_factory=dict)


def milliseconds(call: Callable[[], object], repeats: int = 20) -> float:
    """Median; `call` waits for the GPU."""
    seconds = []
    for _ in range(3 + repeats):
        started_at = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started_at)
    return round(1e3 * statistics.median(seconds[3:]), 3)
