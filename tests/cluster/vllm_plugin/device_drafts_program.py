"""The program of `test_device_drafts.py`: one engine whose runner drafts; prints what differs and what was counted."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cluster.vllm.core.device_rounds import DeviceRounds
from tests.soak import length

from .scheduled_engine import generate, read_request, start_engine

MAX_TOKENS = length(12, 24)
MAX_DRAFTS = 4


@dataclass(frozen=True)
class Way:
    """The requested depths; `None` leaves the depth to the rounds."""

    name: str
    depths: Sequence[int | None]  # of the cases in turn
    tries: bool = False  # as before the first request: all depths in turn
    pads: bool = False  # further drafts are made for more sequences than there are, as by recorded steps on a GPU
    aborts: bool = False


WAYS = (
    Way("without drafts", (0,)),
    Way("of one depth", (MAX_DRAFTS,)),
    Way("of several depths", (0, 1, 3, MAX_DRAFTS)),
    Way("tried", (None,), tries=True),
    Way("chosen", (None, None, 2)),
    Way("aborted", (MAX_DRAFTS,), aborts=True),
    Way("padded", (0, 1, 3, MAX_DRAFTS), pads=True),
)


def main() -> None:
    asked, lines = read_request()
    engine, scheduler = start_engine(asked["engine"])
    expected: dict[int, list[int]] | None = None
    for way in (way for way in WAYS if way.name in asked["ways"]):
        scheduler.rounds = rounds = CountedRounds(MAX_DRAFTS, 3, is_fixed=False)
        if not way.tries:
            rounds.tried()
        if way.pads:
            engine.collective_rpc(_pad)
        depth_of = partial(_depth_of, way)
        found = generate(engine, way.name, asked["cases"], MAX_TOKENS, aborts=way.aborts, depth_of=depth_of)
        expected = expected or found
        told = {
            "way": way.name,
            "different": [index for index, tokens in found.items() if tokens != expected[index]],
            "num_answers": len(found),
            "drafted": rounds.num_drafted,
            "accepted": rounds.num_accepted,
            "depths": sorted(rounds.depths),
            "preemptions": scheduler.num_preemptions,
        }
        print(json.dumps(told), file=lines, flush=True)
    os._exit(0)  # some of vLLM's threads would not end


def _pad(worker: Any) -> None:
    from cluster.vllm.runner.coupled_drafts import RecordedSpeculator

    speculator = worker.model_runner.speculator
    if not isinstance(speculator, RecordedSpeculator):
        return
    speculator.recorded_further[speculator.max_num_reqs] = partial(speculator.draft_further, speculator.max_num_reqs)


class CountedRounds(DeviceRounds):
    """The rounds, with what became of the drafts; a depth that is left to them is any."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.num_drafted = self.num_accepted = 0
        self.depths: set[int] = set()
        self._rng = random.Random(1)
        self._depths.next_depth = lambda _: self._rng.randint(0, 1) * MAX_DRAFTS  # type: ignore[method-assign]

    def ran(self, requests: Any, depth: int) -> None:
        super().ran(requests, depth)
        self.depths.add(depth)

    def end(self, step: Any) -> None:
        super().end(step)
        self.num_drafted += sum(len(committed.draft_token_ids) for committed in step.rounds)
        self.num_accepted += sum(committed.num_accepted for committed in step.rounds)


def _depth_of(way: Way, case: int) -> int | None:
    return way.depths[case % len(way.depths)]


if __name__ == "__main__":
    main()
