"""Measures where a step of Outrider on vLLM loses time: `python -m bench.vllm_ladder --model DIR`.

Each rung is a vLLM engine that adds one thing to the one before it: the runner, the kind of scheduling, room for
drafts, our sampling, our scheduler, the coordinator, drafts that come after their step was submitted. All engines load
at once, each in a process of its own, and measure in turn: tokens per second without a server, and on a GPU how long
it stands idle in a step. Drafts here are wrong: a step is then a token, whatever was drafted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bench.machine import describe_machine
from bench.workload import held_out_prompts
from cluster.config.speculation import SpeculationConfig
from cluster.coordination.pool import DraftPool
from cluster.engine.limits import StepLimits
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.targets.vllm.scheduler_rounds import CoordinatedRounds, Links
from cluster.vllm.coupling import Coupling

if TYPE_CHECKING:
    from vllm import LLMEngine
    from vllm.v1.request import Request

    from cluster.vllm.scheduler import EngineStep

MAX_MODEL_LEN = 1024
_PROFILED_STEPS = 20
_PROPOSER = "cluster.vllm.proposer.NoProposer"


@dataclass(frozen=True, slots=True)
class Rung:
    adds: str
    runner: Literal["V1", "V2"]
    is_async: bool = False
    num_drafts: int = 0  # rows that the engine has room for, of each sequence
    is_coupled: bool = False
    rounds: Literal["", "none", "coordinator", "drafts"] = ""  # of our scheduler; "": it is vLLM's own
    in_process: bool = True  # the runner, in the engine core's


RUNGS = {
    "R0": Rung("vLLM, V1 runner, asynchronous", "V1", is_async=True),
    "R1": Rung("synchronous", "V1"),
    "R2": Rung("room for 16 drafts", "V1", num_drafts=16),
    "R3": Rung("for 4", "V1", num_drafts=4),
    "R4": Rung("coupled sampling", "V1", num_drafts=4, is_coupled=True),
    "R5": Rung("our scheduler, no rounds", "V1", num_drafts=4, is_coupled=True, rounds="none"),
    "R6": Rung("a coordinator without links", "V1", num_drafts=4, is_coupled=True, rounds="coordinator"),
    "R7": Rung("4 drafts a step", "V1", num_drafts=4, is_coupled=True, rounds="drafts"),
    "R8": Rung("vLLM, V2 runner, asynchronous", "V2", is_async=True),
    "R9": Rung("synchronous", "V2"),
    "R10": Rung("asynchronous, our scheduler, room for 4 drafts", "V2", is_async=True, num_drafts=4, rounds="none"),
    "R11": Rung("coupled sampling", "V2", is_async=True, num_drafts=4, is_coupled=True, rounds="none"),
    "R12": Rung("a coordinator", "V2", is_async=True, num_drafts=4, is_coupled=True, rounds="coordinator"),
    "R13": Rung("the runner in a process", "V2", True, 4, is_coupled=True, rounds="coordinator", in_process=False),
    "R14": Rung("4 drafts a step", "V2", True, 4, is_coupled=True, rounds="drafts", in_process=False),
}


class FixedDrafts:
    """`cluster.vllm.scheduler.Rounds` that gives every sequence `num_drafts` wrong drafts at once."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    def plan(self, decoding: Sequence[Request], joining: Sequence[Request]) -> Mapping[str, int]:
        return {request.request_id: self._num_drafts for request in decoding}

    def collect(self, decoding: Sequence[Request]) -> Mapping[str, Sequence[int]]:
        return {request.request_id: [0] * self._num_drafts for request in decoding}

    def scheduled(self, joining: Sequence[Request]) -> None:
        """Nothing is drafted for them."""

    def end(self, step: EngineStep) -> None:
        """There is no drafter to notify."""

    def close(self, request: Request) -> None:
        """Does nothing: no state is kept by request."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.run:
        _climb(arguments)
        return 0
    results: dict[str, dict[str, Any]] = {}
    for group in arguments.rungs:
        results |= _measure_together(group, arguments)
    document = {
        "machine": describe_machine(),
        "model": arguments.model.name,
        "tokens": arguments.tokens,
        "rungs": {name: {"adds": RUNGS[name].adds, **result} for name, result in results.items()},
    }
    arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(table(document))
    return 0


def table(document: dict[str, Any]) -> str:
    """Milliseconds a step of each rung; a row for each."""
    rungs = document["rungs"]
    points = list(next(iter(rungs.values()))["ms"])
    lines = ["| | adds | " + " | ".join(points) + " | idle |", "| --- " * (len(points) + 3) + "|"]
    for name, rung in rungs.items():
        times = " | ".join(f"{min(rung['ms'][point]):.2f}" for point in points)
        idle = "" if rung["gpu_idle_ms"] is None else f"{rung['gpu_idle_ms']:.2f}"
        lines.append(f"| {name} | {rung['adds']} | {times} | {idle} |")
    return "\n".join(lines)


def _measure_together(names: Sequence[str], arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Loads the engines of the rungs `names` at once, and has them measure one after the other."""
    logs = arguments.out.parent
    options = [f"--model={arguments.model}", f"--tokens={arguments.tokens}", f"--repeats={arguments.repeats}"]
    options += [
        f"--streams={','.join(map(str, arguments.streams))}",
        f"--engine-args={json.dumps(arguments.engine_args)}",
    ]
    options += [f"--temperatures={','.join(map(str, arguments.temperatures))}", f"--device={arguments.device}"]
    children = {}
    for name in names:
        environment = os.environ | {
            "VLLM_USE_V2_MODEL_RUNNER": str(int(RUNGS[name].runner == "V2")),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CACHE_ROOT": f"/tmp/vllm-cache-{name}",
        }
        with (logs / f"ladder-{name}.log").open("wb") as log:
            children[name] = subprocess.Popen(
                [sys.executable, "-m", "bench.vllm_ladder", "--run", name, *options],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
    loaded, results = [], {}
    for name, child in children.items():
        if _line_of(child) == "loaded":
            loaded.append(name)
        else:
            print(f"{name} did not load: {logs}/ladder-{name}.log", file=sys.stderr, flush=True)
    for name in loaded:
        child = children[name]
        assert child.stdin is not None
        print("measure", file=child.stdin, flush=True)
        line = _line_of(child)
        if line:
            results[name] = json.loads(line)
            print(name, RUNGS[name].adds, line, file=sys.stderr, flush=True)
        child.kill()
    for child in children.values():
        child.kill()
        child.wait()
    return results


def _line_of(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


# A rung, in a process of its own.


def _climb(arguments: argparse.Namespace) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    rung = RUNGS[arguments.run]
    engine = _engine(rung, arguments)
    prompts = held_out_prompts(max(arguments.streams), seed=1)
    for count in arguments.streams:  # kernels are compiled, shapes recorded
        _seconds(engine, rung, prompts[:count], 1.0, 8)
        _seconds(engine, rung, prompts[:count], 0.0, 8)
    print("loaded", file=answers, flush=True)
    if not sys.stdin.readline():  # the parent process has ended
        os._exit(1)
    times = {}
    for count in arguments.streams:
        for temperature in arguments.temperatures:
            runs = [
                _seconds(engine, rung, prompts[:count], temperature, arguments.tokens) for _ in range(arguments.repeats)
            ]
            times[f"{count} streams, T = {temperature:g}"] = [1e3 * seconds / arguments.tokens for seconds in runs]
    is_seen = arguments.device == "cuda" and rung.in_process
    idle = _gpu_idle_ms(engine, rung, prompts[:1]) if is_seen else None
    print(json.dumps({"ms": times, "gpu_idle_ms": idle}), file=answers, flush=True)
    sys.stdin.readline()
    os._exit(0)  # some of vLLM's threads would not end


def _engine(rung: Rung, arguments: argparse.Namespace) -> LLMEngine:
    from vllm import EngineArgs, LLMEngine
    from vllm.v1.executor import Executor

    from cluster.vllm.async_scheduler import AsyncRoundScheduler
    from cluster.vllm.engine_args import COUPLED_SAMPLING, carrier
    from cluster.vllm.sampling import EXTENSION
    from cluster.vllm.scheduler import RoundScheduler

    is_v2, values = rung.runner == "V2", dict(arguments.engine_args)
    values |= {
        "model": str(arguments.model),
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": False,
        "async_scheduling": rung.is_async,
        "disable_log_stats": True,
        "worker_extension_cls": EXTENSION,
    }
    if not rung.in_process:
        values["distributed_executor_backend"] = "mp"
    if rung.num_drafts:
        own = {"method": "custom_class", "model": _PROPOSER, "num_speculative_tokens": rung.num_drafts}
        values["speculative_config"] = carrier(rung.num_drafts) if is_v2 else own
    if rung.is_coupled and is_v2:
        values["logits_processors"] = [COUPLED_SAMPLING]
    if rung.rounds:
        values["scheduler_cls"] = AsyncRoundScheduler if is_v2 else RoundScheduler
    config = EngineArgs(**values).create_engine_config()
    engine = LLMEngine(config, Executor.get_class(config), log_stats=False)
    if rung.is_coupled and not is_v2:
        engine.collective_rpc("install_coupled_sampling")
    if rung.rounds:
        scheduler = engine.engine_core.engine_core.scheduler
        if rung.rounds == "coordinator":
            limits = StepLimits(MAX_MODEL_LEN, 32, 2048)
            vocab_size = config.model_config.get_vocab_size()
            links = Links(lambda: DraftPool("none"))
            speculation = SpeculationConfig()
            scheduler.rounds = CoordinatedRounds(
                links, speculation, vocab_size, limits, reserves_rows=scheduler.plans_early
            )
        else:
            scheduler.rounds = FixedDrafts(rung.num_drafts if rung.rounds == "drafts" else 0)
    return engine


def _seconds(
    engine: LLMEngine, rung: Rung, prompts: Sequence[Sequence[int]], temperature: float, num_tokens: int
) -> float:
    """Seconds to generate `num_tokens` after each of `prompts`, all at once."""
    started_at = time.perf_counter()
    for _ in _steps(engine, rung, prompts, temperature, num_tokens):
        pass
    return time.perf_counter() - started_at


def _steps(
    engine: LLMEngine, rung: Rung, prompts: Sequence[Sequence[int]], temperature: float, num_tokens: int
) -> Iterator[None]:
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind

    for index, prompt in enumerate(prompts):
        coupling = Coupling(SamplingParams(temperature=temperature), NoiseKey.derive(index, 0), len(prompt))
        params = VllmParams(
            temperature=0.0 if rung.is_coupled else temperature,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=coupling.to_extra_args() if rung.is_coupled else None,
        )
        engine.add_request(f"{time.monotonic_ns()}-{index}", {"prompt_token_ids": list(prompt)}, params)
    while engine.has_unfinished_requests():
        engine.step()
        yield


def _gpu_idle_ms(engine: LLMEngine, rung: Rung, prompts: Sequence[Sequence[int]]) -> float:
    """Returns the mean time that the GPU is idle in a step of one stream, in milliseconds."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    steps = _steps(engine, rung, prompts, 0.0, 3 * _PROFILED_STEPS)
    for _ in range(_PROFILED_STEPS):
        next(steps)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(_PROFILED_STEPS):
            next(steps)
        torch.cuda.synchronize()
    for _ in steps:
        pass
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if str(event.device_type).endswith("CUDA")
    )
    begun_at: float = spans[0][0]
    busy, until = 0.0, begun_at
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return (until - begun_at - busy) / 1e3 / _PROFILED_STEPS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.vllm_ladder", description=(__doc__ or "").partition("\n")[0])
    groups = ",".join(RUNGS)
    parser.add_argument("--model", type=Path, required=True, help="folder of the target")
    parser.add_argument(
        "--rungs",
        type=lambda text: [group.split(",") for group in text.split(";")],
        default=[groups.split(",")],
        help="with commas between those that load at once, semicolons between groups of them",
    )
    parser.add_argument("--streams", type=lambda text: [int(n) for n in text.split(",")], default=[1, 16])
    parser.add_argument("--temperatures", type=lambda text: [float(t) for t in text.split(",")], default=[0.0, 1.0])
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="further arguments of vLLM, as JSON")
    parser.add_argument("--out", type=Path, default=Path("bench/results/vllm-ladder.json"))
    parser.add_argument("--run", choices=RUNGS, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
