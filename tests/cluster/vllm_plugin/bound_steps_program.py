"""The program of `test_bound_steps.py`: one engine, drafts from an oracle; prints what differs and what was counted."""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.soak import length

from .scheduled_engine import generate, read_request, start_engine

MAX_TOKENS = length(12, 20)
MAX_DRAFTS = 6


@dataclass(frozen=True)
class Way:
    """How the oracle drafts."""

    name: str
    max_drafts: int = MAX_DRAFTS
    quality: float = 0.8  # of the tokens are right
    share: float = 1.0  # of what was planned comes
    late_seconds: float = 0.0  # sometimes
    aborts: bool = False


WAYS = (
    Way("without drafts", max_drafts=0),
    Way("good"),
    Way("missing", share=0.0),
    Way("late", late_seconds=1.5),
    *length((), (Way("random", quality=0.0), Way("too few", share=0.5), Way("aborted", aborts=True))),
)


class Oracle:
    """`cluster.vllm.core.scheduler.Rounds` that knows the answers."""

    spare_seconds = math.inf

    def __init__(self, way: Way, answers: Sequence[Sequence[int]] | None, vocab_size: int) -> None:
        self.way, self.answers, self.vocab_size = way, answers, vocab_size
        self.rng = random.Random(1)
        self.num_drafted = self.num_accepted = 0

    def plan(self, decoding: Sequence[Any], joining: Sequence[Any]) -> Mapping[str, int]:
        return {request.request_id: self.rng.randint(0, self.way.max_drafts) for request in decoding}

    def collect(self, decoding: Sequence[Any]) -> Mapping[str, Sequence[int]]:
        if self.way.late_seconds and self.rng.random() < 0.1:
            time.sleep(self.way.late_seconds)
        return {request.request_id: list(self._drafts(request)) for request in decoding}

    def _drafts(self, request: Any) -> Iterator[int]:
        if self.answers is None or self.rng.random() >= self.way.share:
            return
        done = request.num_tokens - request.num_prompt_tokens
        right = self.answers[request.sampling_params.extra_args["case"]]
        for token in right[done : done + self.rng.randint(0, MAX_DRAFTS)]:
            yield token if self.rng.random() < self.way.quality else self.rng.randrange(self.vocab_size)

    def scheduled(self, joining: Sequence[Any]) -> None:
        """Nothing is drafted for them."""

    def end(self, step: Any) -> None:
        self.num_drafted += sum(len(committed.draft_token_ids) for committed in step.rounds)
        self.num_accepted += sum(committed.num_accepted for committed in step.rounds)

    def close(self, request: Any) -> None:
        """Nothing is kept of it."""


def main() -> None:
    from cluster.vllm.engine_args import carrier

    asked, lines = read_request()
    engine, scheduler = start_engine(asked["engine"] | {"speculative_config": carrier(MAX_DRAFTS)})
    vocab_size, expected = engine.model_config.get_vocab_size(), None
    for way in WAYS:
        scheduler.rounds = oracle = Oracle(way, expected, vocab_size)
        found = generate(engine, way.name, asked["cases"], MAX_TOKENS, aborts=way.aborts)
        expected = expected or [found[index] for index in range(len(found))]
        told = {
            "way": way.name,
            "different": [index for index, tokens in found.items() if tokens != expected[index]],
            "num_answers": len(found),
            "drafted": oracle.num_drafted,
            "accepted": oracle.num_accepted,
            "preemptions": scheduler.num_preemptions,
            "without_drafts": scheduler.num_without_drafts,
            "answers": expected,
        }
        print(json.dumps(told), file=lines, flush=True)
    os._exit(0)  # some of vLLM's threads would not end


if __name__ == "__main__":
    main()
