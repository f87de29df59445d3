"""The program of `test_device_drafts.py`: one engine whose runner drafts; prints what differs and what was counted."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cluster.vllm.device_rounds import DeviceRounds
from tests.soak import length

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
    answers_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import EngineArgs, LLMEngine
    from vllm.v1.executor import Executor

    from cluster.vllm.async_scheduler import AsyncRoundScheduler
    from cluster.vllm.engine_args import COUPLED_SAMPLING, allow_bias
    from cluster.vllm.sampling import EXTENSION

    asked = json.loads(sys.stdin.readline())
    allow_bias()
    values = asked["engine"] | {"scheduler_cls": AsyncRoundScheduler, "worker_extension_cls": EXTENSION}
    values |= {"logits_processors": [COUPLED_SAMPLING]}
    config = EngineArgs(**values, async_scheduling=True, distributed_executor_backend="mp").create_engine_config()
    assert config.scheduler_config.async_scheduling
    engine = LLMEngine(config, Executor.get_class(config), log_stats=False)
    engine.collective_rpc("install_bound_steps")
    scheduler: Any = engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
    expected: dict[int, list[int]] | None = None
    for way in WAYS:
        scheduler.rounds = rounds = CountedRounds(MAX_DRAFTS, 3, is_fixed=False)
        if not way.tries:
            rounds.tried()
        if way.pads:
            engine.collective_rpc(_pad)
        found = _generate(engine, asked["cases"], way)
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
        print(json.dumps(told), file=answers_to, flush=True)
    os._exit(0)  # some of vLLM's threads would not end


def _pad(worker: Any) -> None:
    from cluster.vllm.coupled_drafts import RecordedSpeculator

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


def _generate(engine: Any, cases: Sequence[dict[str, Any]], way: Way) -> dict[int, list[int]]:
    for index, case in enumerate(cases):
        engine.add_request(f"{way.name} {index}", {"prompt_token_ids": case["prompt"]}, _params(way, index, case))
    answers: dict[int, list[int]] = {}
    for num_steps, outputs in enumerate(_steps(engine), 1):
        if way.aborts and num_steps in (3, 6, 9):
            engine.abort_request([f"{way.name} {num_steps // 3}"])
        for output in outputs:
            if output.finished and len(output.outputs[0].token_ids) == MAX_TOKENS:
                answers[int(output.request_id.rpartition(" ")[2])] = list(output.outputs[0].token_ids)
    return answers


def _steps(engine: Any) -> Iterator[Any]:
    while engine.has_unfinished_requests():
        yield engine.step()


def _params(way: Way, index: int, case: dict[str, Any]) -> Any:
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind

    from cluster.speculation.noise import NoiseKey
    from cluster.speculation.params import SamplingParams
    from cluster.vllm.coupling import Coupling

    bias = tuple((int(token), value) for token, value in case["fields"].get("logit_bias", {}).items())
    own = {name: value for name, value in case["fields"].items() if name != "logit_bias"}
    shape, key = SamplingParams(**own, logit_bias=bias), NoiseKey.derive(index, 0)
    coupling = Coupling(shape, key, len(case["prompt"]), way.depths[index % len(way.depths)])
    return VllmParams(
        temperature=0.0,
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        logit_bias=dict(bias) or None,
        extra_args=coupling.to_extra_args(),
        **{name: value for name, value in own.items() if name.endswith("penalty")},
    )


if __name__ == "__main__":
    main()
