"""The program of `test_bound_steps.py`: one engine, drafts from an oracle; prints what differs and what was counted."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.soak import length

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
    Way("random", quality=0.0),
    Way("too few", share=0.5),
    Way("missing", share=0.0),
    Way("late", late_seconds=1.5),
    Way("aborted", aborts=True),
)


class Oracle:
    """`cluster.vllm.scheduler.Rounds` that knows the answers."""

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
    answers_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import EngineArgs, LLMEngine
    from vllm.v1.executor import Executor

    from cluster.vllm.async_scheduler import AsyncRoundScheduler
    from cluster.vllm.engine_args import COUPLED_SAMPLING, allow_bias, carrier
    from cluster.vllm.sampling import EXTENSION

    asked = json.loads(sys.stdin.readline())
    allow_bias()
    values = asked["engine"] | {"scheduler_cls": AsyncRoundScheduler, "worker_extension_cls": EXTENSION}
    values |= {"logits_processors": [COUPLED_SAMPLING], "speculative_config": carrier(MAX_DRAFTS)}
    config = EngineArgs(**values, async_scheduling=True, distributed_executor_backend="mp").create_engine_config()
    assert config.scheduler_config.async_scheduling
    engine = LLMEngine(config, Executor.get_class(config), log_stats=False)
    engine.collective_rpc("install_bound_steps")
    scheduler: Any = engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
    vocab_size, expected = config.model_config.get_vocab_size(), None
    for way in WAYS:
        scheduler.rounds = oracle = Oracle(way, expected, vocab_size)
        found = _generate(engine, asked["cases"], way)
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
        print(json.dumps(told), file=answers_to, flush=True)
    os._exit(0)  # some of vLLM's threads would not end


def _generate(engine: Any, cases: Sequence[dict[str, Any]], way: Way) -> dict[int, list[int]]:
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind

    from cluster.speculation.noise import NoiseKey
    from cluster.speculation.params import SamplingParams
    from cluster.vllm.coupling import Coupling

    for index, case in enumerate(cases):
        bias = tuple((int(token), value) for token, value in case["fields"].get("logit_bias", {}).items())
        own = {name: value for name, value in case["fields"].items() if name != "logit_bias"}
        coupling = Coupling(SamplingParams(**own, logit_bias=bias), NoiseKey.derive(index, 0), len(case["prompt"]))
        params = VllmParams(
            temperature=0.0,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            logit_bias=dict(bias) or None,
            extra_args={**coupling.to_extra_args(), "case": index},
            **{name: value for name, value in own.items() if name.endswith("penalty")},
        )
        engine.add_request(f"{way.name} {index}", {"prompt_token_ids": case["prompt"]}, params)
    answers: dict[int, list[int]] = {}
    num_steps = 0
    while engine.has_unfinished_requests():
        num_steps += 1
        if way.aborts and num_steps in (3, 6, 9):
            engine.abort_request([f"{way.name} {num_steps // 3}"])
        for output in engine.step():
            if output.finished and len(output.outputs[0].token_ids) == MAX_TOKENS:
                answers[int(output.request_id.rpartition(" ")[2])] = list(output.outputs[0].token_ids)
    return answers


if __name__ == "__main__":
    main()
