"""An engine with the V2 runner and our asynchronous scheduler, for programs that compare ways to draft."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from .environment import ROOT, environment


def run_program(module: str, asked: Mapping[str, Any], folder: Path) -> dict[str, dict[str, Any]]:
    """Runs `module` of this folder. Returns its lines by `way`."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.cluster.vllm_plugin.{module}"],
        cwd=ROOT,
        env={**environment(folder), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        input=json.dumps(asked) + "\n",
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, "the engine has ended; why is on stderr"
    return {line["way"]: line for line in map(json.loads, done.stdout.splitlines())}


def read_request() -> tuple[dict[str, Any], TextIO]:
    """Returns the request of `run_program`, and where to write lines. Everything else goes to stderr from now on."""
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return json.loads(sys.stdin.readline()), lines


def start_engine(values: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns an engine with the arguments `values`, and its scheduler."""
    from vllm import EngineArgs, LLMEngine
    from vllm.v1.executor import Executor

    from cluster.vllm.core.async_scheduler import AsyncRoundScheduler
    from cluster.vllm.engine_args import COUPLED_SAMPLING, allow_bias

    allow_bias()
    ours = {"scheduler_cls": AsyncRoundScheduler, "logits_processors": [COUPLED_SAMPLING], "async_scheduling": True}
    ours |= {"distributed_executor_backend": "mp"}
    config = EngineArgs(**values, **ours).create_engine_config()
    assert config.scheduler_config.async_scheduling
    engine = LLMEngine(config, Executor.get_class(config), log_stats=False)
    return engine, engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]


def generate(
    engine: Any,
    name: str,
    cases: Sequence[dict[str, Any]],
    max_tokens: int,
    *,
    aborts: bool,
    depth_of: Callable[[int], int | None] = lambda _: None,
) -> dict[int, list[int]]:
    """Returns the whole answers by the index of their case; `aborts`: some requests end early.

    `depth_of`: drafts a step that the request of a case asks for.
    """
    for index, case in enumerate(cases):
        params = _params(index, case, max_tokens, depth_of(index))
        engine.add_request(f"{name} {index}", {"prompt_token_ids": case["prompt"]}, params)
    answers: dict[int, list[int]] = {}
    num_steps = 0
    while engine.has_unfinished_requests():
        num_steps += 1
        if aborts and num_steps in (3, 6, 9):
            engine.abort_request([f"{name} {num_steps // 3}"])
        for output in engine.step():
            if output.finished and len(output.outputs[0].token_ids) == max_tokens:
                answers[int(output.request_id.rpartition(" ")[2])] = list(output.outputs[0].token_ids)
    return answers


def _params(index: int, case: dict[str, Any], max_tokens: int, depth: int | None) -> Any:
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind

    from cluster.speculation.noise import NoiseKey
    from cluster.speculation.params import SamplingParams
    from cluster.vllm.coupling import Coupling

    bias = tuple((int(token), value) for token, value in case["fields"].get("logit_bias", {}).items())
    own = {name: value for name, value in case["fields"].items() if name != "logit_bias"}
    shape, key = SamplingParams(**own, logit_bias=bias), NoiseKey.derive(index, 0)
    return VllmParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        logit_bias=dict(bias) or None,
        extra_args={**Coupling(shape, key, len(case["prompt"]), depth).to_extra_args(), "case": index},
        **{name: value for name, value in own.items() if name.endswith("penalty")},
    )
