"""Measures in virtual time how long a GPU idles between vLLM's steps: `python -m bench.vllm_idle`.

vLLM's engine core, our schedulers, the coordinator and `DraftWorker` are real. Model runner, draft model and links are
simulated: a device runs steps one after the other, each for the time that the planner predicts. Host work takes fixed
times. Every stream sends a request when its previous one is answered.

A step's idle time runs from the previous step's end to its own start. `waited_ms` is the part spent waiting for drafts.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import astuple, dataclass, field, fields
from types import SimpleNamespace
from typing import Any

import torch

from bench.in_process import SIMULATED
from bench.pool import ANSWER_TOKENS, DRAFTS, step_curve
from cluster.config.file import load_config
from cluster.engine.limits import StepLimits
from cluster.model_folder import resolve_model_folder
from cluster.simulated_engines.steps import StepCurve
from cluster.simulated_engines.tokens import token_at
from cluster.simulator.drafts import VOCAB_SIZE, SimulatedDraft, VirtualDraft, VirtualPool
from cluster.simulator.turns import VirtualTime
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams

TARGETS = {"8B": "H100", "70B": "4xA100-80"}
_DRAFTS = ("", "0.5B", "1B")
DRAFT_GPU, DELAY_SECONDS = "A10G", 0.0005
MAX_DRAFTS = 8
# Seconds of host work per step. They add up to about the idle time on an H100 with synchronous scheduling, 1.34 ms on
# 2026-11-26; how it is divided is an estimate.
SCHEDULE, PREPARE, RETURN, UPDATE = 0.0003, 0.0007, 0.00005, 0.0003
_WARM_UP_SHARE = 0.3
PROMPT_TOKENS = 128
_ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_NUM_BLOCKS = 8192  # no request is preempted
_BLOCK_SIZE = 32
_MAX_MODEL_LEN = 1024


@dataclass(frozen=True, slots=True)
class Case:
    target: str  # a key of TARGETS
    draft: str  # a key of `bench.pool.DRAFTS`; "": no speculation
    streams: int
    is_async: bool
    acceptance: float = 0.8

    @property
    def target_curve(self) -> list[tuple[int, float]]:
        return self._curve(self.target, TARGETS[self.target])

    @property
    def draft_curve(self) -> list[tuple[int, float]]:
        return self._curve(DRAFTS[self.draft], DRAFT_GPU) if self.draft else [(1, 0.0)]

    def _curve(self, model: str, gpus: str) -> list[tuple[int, float]]:
        return step_curve(model, gpus, self.streams, PROMPT_TOKENS + ANSWER_TOKENS / 2, _ROWS)


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over the steps after the warm-up; times in milliseconds."""

    tokens_per_second: float
    step_ms: float
    waited_ms: float
    other_ms: float  # idle time that is not spent waiting for drafts
    sequences: float  # per step
    drafts: float  # per sequence and step


@dataclass(slots=True)
class Step:
    begins_at: float
    ends_at: float
    idle: float
    num_sequences: int
    num_drafts: int
    num_tokens: int  # committed
    waited: float  # seconds, for its drafts


@dataclass(slots=True)
class _Submitted:
    output: Any  # vLLM's SchedulerOutput
    ready_at: float


@dataclass(slots=True)
class Device:
    """Runs steps in the order of their submission, and stands in for vLLM's model runner."""

    time: VirtualTime
    curve: StepCurve
    is_async: bool
    opened_at: dict[int, float] = field(default_factory=dict)  # by number of the bound step
    drafts: dict[int, Mapping[str, Sequence[int]]] = field(default_factory=dict)  # by number of the bound step
    steps: list[Step] = field(default_factory=list)
    waited: float = 0.0  # seconds, for the drafts of the next step
    _submitted: list[_Submitted] = field(default_factory=list)
    _worker_at: float = 0.0
    _free_at: float = 0.0
    _lengths: dict[str, int] = field(default_factory=dict)  # committed tokens of each request
    _computed: dict[str, int] = field(default_factory=dict)
    _keys: dict[str, NoiseKey] = field(default_factory=dict)

    def spend(self, seconds: float) -> None:
        """Advances the time by host work of `seconds`."""
        self.time.sleep_until(self.time.now() + seconds)

    def open(self, bound: Any, drafts: Sequence[Sequence[int]]) -> None:
        """Opens the gate of the bound step with `drafts`, one sequence per request."""
        self.opened_at[bound.number] = self.time.now()
        self.drafts[bound.number] = dict(zip(bound.request_ids, drafts, strict=True))

    def submit(self, output: Any) -> None:
        """Prepares a step in the worker's process while the device may still run the previous one."""
        self._worker_at = max(self._worker_at, self.time.now()) + PREPARE
        self._submitted.append(_Submitted(output, self._worker_at))

    def result(self) -> Any:
        """Waits for the oldest submitted step, and returns its ModelRunnerOutput."""
        from vllm.v1.outputs import ModelRunnerOutput

        from cluster.vllm.draft_gate import BOUND_STEP

        step = self._submitted.pop(0)
        scheduled = step.output.num_scheduled_tokens
        drafts = dict(step.output.scheduled_spec_decode_tokens)
        bound = getattr(step.output, BOUND_STEP, None)
        opened_at = 0.0
        if bound is not None:
            opened_at = self.opened_at.pop(bound.number)
            drafts = {name: list(found) for name, found in self.drafts.pop(bound.number).items()}
        for new in step.output.scheduled_new_reqs:
            self._admit(new)
        tokens = [self._compute(name, number, drafts.get(name, ())) for name, number in scheduled.items()]
        if scheduled:
            begins_at = max(step.ready_at, self._free_at, opened_at)
            ends_at = begins_at + self.curve.at(sum(scheduled.values()))
            idle = begins_at - self._free_at if self.steps else 0.0
            num_drafts, num_tokens = sum(map(len, drafts.values())), sum(map(len, tokens))
            self.steps.append(Step(begins_at, ends_at, idle, len(scheduled), num_drafts, num_tokens, self.waited))
            self.waited = 0.0
            self._free_at = ends_at
            self.time.sleep_until(ends_at + RETURN)
        return ModelRunnerOutput(
            req_ids=list(scheduled),
            req_id_to_index={name: index for index, name in enumerate(scheduled)},
            sampled_token_ids=tokens,
        )

    def _admit(self, new: Any) -> None:
        from cluster.vllm.coupling import Coupling

        coupling = Coupling.of(new.sampling_params)
        assert coupling is not None
        self._keys[new.req_id] = coupling.noise_key
        self._lengths[new.req_id], self._computed[new.req_id] = len(new.prompt_token_ids), new.num_computed_tokens

    def _compute(self, name: str, num_tokens: int, drafts: Sequence[int]) -> list[int]:
        """Returns the tokens that a step of `num_tokens` commits for a request: accepted drafts and one more."""
        length = self._lengths[name]
        self._computed[name] += num_tokens
        if self._computed[name] < length:  # a part of a prompt
            return []
        tokens = [token_at(self._keys[name], length, VOCAB_SIZE)]
        for draft in drafts:
            if draft != tokens[-1]:
                break
            tokens.append(token_at(self._keys[name], length + len(tokens), VOCAB_SIZE))
        self._lengths[name] += len(tokens)
        self._computed[name] = self._lengths[name] - 1
        return tokens


class Output(Future[Any]):
    """The output of a submitted step. Time passes when it is read."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def result(self, timeout: float | None = None) -> Any:
        return self._device.result()


def run(case: Case, seconds: float) -> Figures:
    """Runs `case` for `seconds` of virtual time."""
    time = VirtualTime()
    device = Device(time, StepCurve(case.target_curve), case.is_async)
    core = _engine_core(device, case)
    if case.draft:
        _connect(core.scheduler, device, case)
    numbers = itertools.count()
    for _ in range(case.streams):
        core.add_request(_request(next(numbers)))
    while time.now() < seconds:
        outputs, was_executed = core.step_fn()
        core.post_step(was_executed)
        for of_client in (outputs or {}).values():
            for output in of_client.outputs:
                if output.finish_reason is not None:
                    core.add_request(_request(next(numbers)))
    core.shutdown()
    return _figures(device.steps, seconds)


def _figures(steps: Sequence[Step], seconds: float) -> Figures:
    counted = [step for step in steps if step.begins_at > _WARM_UP_SHARE * seconds]
    number, span = len(counted), counted[-1].ends_at - counted[0].begins_at
    num_sequences = sum(step.num_sequences for step in counted)
    return Figures(
        tokens_per_second=sum(step.num_tokens for step in counted) / span,
        step_ms=1e3 * sum(step.ends_at - step.begins_at for step in counted) / number,
        waited_ms=1e3 * sum(min(step.waited, step.idle) for step in counted) / number,
        other_ms=1e3 * sum(max(0.0, step.idle - step.waited) for step in counted) / number,
        sequences=num_sequences / number,
        drafts=sum(step.num_drafts for step in counted) / num_sequences,
    )


def _request(number: int) -> Any:
    """Returns the vLLM request with this number. Lengths of answers differ, so that requests end at different times."""
    from vllm import SamplingParams as VllmParams
    from vllm.v1.request import Request

    from cluster.vllm.coupling import Coupling

    max_tokens = ANSWER_TOKENS // 2 + number * 37 % ANSWER_TOKENS
    coupling = Coupling(SamplingParams(), NoiseKey.derive(number, 0), PROMPT_TOKENS)
    params = VllmParams(max_tokens=max_tokens, ignore_eos=True, extra_args=coupling.to_extra_args())
    return Request(str(number), [(number * 31 + place) % VOCAB_SIZE for place in range(PROMPT_TOKENS)], params, None)


def _engine_core(device: Device, case: Case) -> Any:
    """Returns an engine core with our scheduler, whose executor hands all steps to `device`."""
    from vllm import EngineArgs
    from vllm.v1.engine.core import EngineCore

    values: dict[str, Any] = {
        "model": str(resolve_model_folder("outrider-target-12m")),
        "skip_tokenizer_init": True,
        "max_model_len": _MAX_MODEL_LEN,
        "max_num_seqs": 2 * case.streams,
        "max_num_batched_tokens": 2048,
        "block_size": _BLOCK_SIZE,
        "num_gpu_blocks_override": _NUM_BLOCKS,
        "kv_cache_memory_bytes": 2**30,
        "enable_prefix_caching": False,
        "scheduler_cls": _scheduler_class(device),
    }
    if case.draft:
        proposer = "cluster.vllm.runner.proposer.NoProposer"
        values["speculative_config"] = {
            "method": "custom_class",
            "model": proposer,
            "num_speculative_tokens": MAX_DRAFTS,
        }
    config = EngineArgs(**values).create_engine_config()
    config.scheduler_config.async_scheduling = case.is_async  # vLLM would refuse it on a CPU
    return EngineCore(config, _executor_class(device), log_stats=False)


def _connect(scheduler: Any, device: Device, case: Case) -> None:
    """Gives `scheduler` a coordinator and the link to a draft worker."""
    from cluster.vllm.core.scheduler_rounds import CoordinatedRounds

    class TimedRounds(CoordinatedRounds):
        def collect(self, decoding: Sequence[Any]) -> Mapping[str, Sequence[int]] | None:
            began_at = device.time.now()
            drafts = super().collect(decoding)
            device.waited = device.time.now() - began_at
            return drafts

    config = load_config(
        None,
        [
            *SIMULATED,
            "draft.max_prefill_ms=null",  # prompts of 128 tokens are computed whole
            f"simulation.draft_step_ms={[list(point) for point in case.draft_curve]}",
            f"simulation.acceptance={case.acceptance}",
            f"draft.max_num_seqs={2 * case.streams}",
            "draft.max_num_batched_tokens=2048",
            f"speculation.max_speculative_tokens={MAX_DRAFTS}",
        ],
    )
    draft = VirtualDraft(0, SimulatedDraft(config.simulation, round_trip_seconds=DELAY_SECONDS), config)
    links: Any = SimpleNamespace(pool=VirtualPool(device.time, config.placement.trial_share, [draft]))
    limits = StepLimits(_MAX_MODEL_LEN, scheduler.max_num_running_reqs, scheduler.max_num_scheduled_tokens)
    step_times = [(num_rows, device.curve.at(num_rows)) for num_rows in _ROWS]
    scheduler.rounds = TimedRounds(
        links,
        config.speculation,
        VOCAB_SIZE,
        limits,
        step_times,
        device.time.now,
        reserves_rows=scheduler.plans_early,
    )
    draft.start()


def _scheduler_class(device: Device) -> type[Any]:
    """Returns our scheduler with the host's work in virtual time."""
    from cluster.vllm.core.async_scheduler import AsyncRoundScheduler
    from cluster.vllm.core.scheduler import RoundScheduler

    class TimedScheduler(RoundScheduler):
        clock = staticmethod(device.time.now)

        def schedule(self, throttle_prefills: bool = False) -> Any:
            output = super().schedule(throttle_prefills)
            device.spend(SCHEDULE)
            return output

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            device.spend(UPDATE)
            return super().update_from_output(scheduler_output, model_runner_output)

    class TimedAsyncScheduler(TimedScheduler, AsyncRoundScheduler):
        def _open(self, step: Any, drafts: Sequence[Sequence[int]] | None) -> bool:
            if step.bound is not None:
                device.open(step.bound, drafts or [()] * len(step.bound.request_ids))
            return super()._open(step, drafts)

    return TimedAsyncScheduler if device.is_async else TimedScheduler


def _executor_class(device: Device) -> type[Any]:
    from vllm.v1.executor import Executor

    class DeviceExecutor(Executor):  # type: ignore[misc]
        def _init_executor(self) -> None:
            """Does nothing: there is no worker."""

        def get_kv_cache_specs(self) -> list[dict[str, Any]]:
            from vllm.v1.kv_cache_interface import FullAttentionSpec

            return [{"layer": FullAttentionSpec(_BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)}]

        def get_supported_kv_cache_layouts(self) -> list[list[str]]:
            return [["NHD"]]

        def determine_available_memory(self) -> list[int]:
            return [2**30]

        def collective_rpc(self, method: Any, *arguments: Any, **options: Any) -> list[Any]:
            return []

        def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
            device.submit(scheduler_output)
            if not scheduler_output.num_scheduled_tokens:  # vLLM will not ask for samples
                return Output(device) if non_block else device.result()
            future: Future[Any] = Future()
            future.set_result(None)
            return future

        def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
            return Output(device) if non_block else device.result()

        def take_draft_token_ids(self) -> None:
            """The runner has no drafts."""

        def check_health(self) -> None:
            """Does nothing: there is no worker."""

        def shutdown(self) -> None:
            """Does nothing: there is no worker."""

    return DeviceExecutor


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    titles = [field.name for field in (*fields(Case), *fields(Figures))]
    print(f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|", sep="\n")
    for case in _cases(arguments.streams):
        cells = [*astuple(case), *(f"{figure:.2f}" for figure in astuple(run(case, arguments.seconds)))]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
    return 0


def _cases(streams: Sequence[int]) -> Iterator[Case]:
    for target, draft, number in itertools.product(TARGETS, _DRAFTS, streams):
        for is_async in (False, True):
            yield Case(target, draft, number, is_async)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.vllm_idle", description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16, 64], help="numbers of streams")
    parser.add_argument("--seconds", type=float, default=10.0, help="virtual seconds of a case (default: 10)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
