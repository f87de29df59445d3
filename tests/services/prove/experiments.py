"""A small experiment, and results that are written down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.config import Config
from services.prove.client import RequestBurst, TimedAnswer
from services.prove.devices import Device
from services.prove.measure import Result, Results
from services.prove.systems import BESIDE, PLAIN, REMOTE, STOCK, Experiment

SYSTEMS = (STOCK, PLAIN, BESIDE, REMOTE)


def experiment(**changes: Any) -> Experiment:
    values: dict[str, Any] = {
        "config": Config(),
        "target": Device("cpu", (0,)),
        "draft": Device("cpu", (0,)),
        "streams": (1, 2),
        "prompts": [[1, 2, 3], [4, 5, 6, 7]],
        "max_tokens": 6,
        "answers": 2,
        "temperature": 1.0,
        "repeats": 2,
        "is_streamed": True,
        "has_peer": True,
        "acceptance_rate": 0.78,
    }
    return Experiment(**values | changes)


def result(
    repeat: int, system: str, rate: float, *, num_streams: int = 1, token_ids: Sequence[int] = (1, 2, 3, 4, 5)
) -> Result:
    """One answer at `rate` tokens a second; with drafts four were drafted and two accepted."""
    seconds = len(token_ids) / rate
    answer = TimedAnswer(len(token_ids), seconds / 2, seconds, (seconds / 2,), tuple(token_ids))
    counts = (4.0, 2.0) if system in (BESIDE, REMOTE) else (0.0, 0.0) if system == PLAIN else (None, None)
    return Result(repeat, system, num_streams, RequestBurst([answer], seconds), *counts)


def results(rates: Mapping[str, Sequence[float]], **changes: Any) -> Results:
    """Tokens a second of the repeats of each system, at one stream."""
    own = experiment(**{"streams": (1,), "repeats": max(map(len, rates.values())), **changes})
    made = Results(own, [system for system in SYSTEMS if own.has_peer or system != STOCK])
    made.results = [result(repeat, name, rate) for name, each in rates.items() for repeat, rate in enumerate(each)]
    return made
