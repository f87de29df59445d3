"""Predicts each placement with the planner, before anything is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from cluster.config import Config
from cluster.engine.memory_plan import PlannedModel
from cluster.errors import ConfigurationError
from cluster.planning.hardware import GPUS, GpuGroup, find_gpu
from cluster.planning.kernel_tables import step_predictor
from cluster.planning.options import LOCAL_ROUND_TRIP_SECONDS
from cluster.planning.prediction import ExpectedLoad, Option, Plan, plan
from cluster.planning.round_costs import RUN_AHEAD_HIDES, Drafting
from cluster.planning.steps import NoSteps, StepPredictor
from services.prove.devices import Device, describe
from services.prove.systems import BESIDE, PLAIN, REMOTE, Experiment

_DTYPES = {"auto": "bf16", "bfloat16": "bf16", "float32": "fp32"}

_Curves = Mapping[int, StepPredictor]
"""Steps by the number of streams."""


@dataclass(frozen=True)
class Forecast:
    """The prediction for one placement at one number of streams."""

    system: str
    num_streams: int
    load: ExpectedLoad
    option: Option | None  # None: no prediction
    why_not: str = ""

    @cached_property
    def plan(self) -> Plan | None:
        return None if self.option is None else plan(self.option, self.load)

    def with_acceptance(self, rate: float) -> Plan | None:
        """Returns the plan for another acceptance rate; None without a draft or a plan."""
        if self.option is None or self.option.drafting is None:
            return None
        return plan(replace(self.option, drafting=replace(self.option.drafting, acceptance=rate)), self.load)


def predict(experiment: Experiment) -> list[Forecast]:
    """Predicts all placements at all numbers of streams.

    GPUs are predicted from measured kernels or data sheets, CPUs from steps that are timed here. A forecast without an
    option has a reason, `why_not`.
    """
    loads = {
        num_streams: ExpectedLoad(
            num_streams,
            experiment.prompt_tokens,
            experiment.max_tokens,
            experiment.config.target.max_num_batched_tokens,
            max_prefill_seconds=experiment.config.target.max_prefill_seconds,
        )
        for num_streams in experiment.streams
    }
    target = _tried(lambda: _target_steps(experiment, loads))

    def drafts_on(device: Device) -> _Curves | str:
        return target if isinstance(target, str) else _tried(lambda: _draft_steps(experiment, device, loads))

    remote = drafts_on(experiment.draft)
    beside = remote if experiment.draft == experiment.target else drafts_on(experiment.target)
    beside_seconds = 0.0 if experiment.beside_placement == "in-process" else LOCAL_ROUND_TRIP_SECONDS
    placements = ((PLAIN, None, 0.0), (BESIDE, beside, beside_seconds), (REMOTE, remote, LOCAL_ROUND_TRIP_SECONDS))
    forecasts = []
    for num_streams, load in loads.items():
        for system, drafts, seconds in placements:
            if isinstance(target, str) or isinstance(drafts, str):
                why_not = target if isinstance(target, str) else str(drafts)
                forecasts.append(Forecast(system, num_streams, load, None, why_not))
                continue
            drafting = None
            if drafts is not None:
                drafting = Drafting(
                    drafts[num_streams],
                    experiment.acceptance_rate,
                    seconds,
                    RUN_AHEAD_HIDES if system == REMOTE else 0.0,
                    experiment.config.draft.drafter == "parallel",
                )
            option = Option(system, target[num_streams], drafting, num_speculative_tokens=_depth(experiment))
            forecasts.append(Forecast(system, num_streams, load, option))
    return forecasts


def _depth(experiment: Experiment) -> int | None:
    speculation = experiment.config.speculation
    return speculation.num_speculative_tokens if speculation.controller == "fixed" else None


def _tried(steps: Callable[[], _Curves]) -> _Curves | str:
    """Returns the steps, or the reason why there are none."""
    try:
        return steps()
    except ConfigurationError as error:
        return str(error)


def _target_steps(experiment: Experiment, loads: Mapping[int, ExpectedLoad]) -> _Curves:
    config, device = experiment.config, experiment.target
    if device.kind == "cuda":
        return dict.fromkeys(loads, _on_gpu(config.target, config.target.model, device))
    if config.target.engine != "torch":
        raise ConfigurationError(f"the planner has no step times of target.engine {config.target.engine} on a CPU")
    from services.plan.measure import measure_target  # it runs the engine, so it imports torch

    return _timed(measure_target, _on(config, "target", device), loads, experiment.temperature)


def _draft_steps(experiment: Experiment, device: Device, loads: Mapping[int, ExpectedLoad]) -> _Curves:
    config = experiment.config
    if config.draft.drafter == "ngram":
        return dict.fromkeys(loads, NoSteps())
    if config.draft.drafter not in ("model", "vllm"):
        raise ConfigurationError(f"the planner has no step times of draft.drafter {config.draft.drafter}")
    if device.kind == "cuda":
        return dict.fromkeys(loads, _on_gpu(config.draft, config.draft.model, device))
    if config.draft.drafter == "vllm":
        raise ConfigurationError("the planner has no step times of draft.drafter vllm on a CPU")
    from services.plan.measure import measure_draft  # it runs the engine, so it imports torch

    return _timed(measure_draft, _on(config, "draft", device), loads, experiment.temperature)


def _timed(
    measure: Callable[[Config, Sequence[ExpectedLoad], float], Sequence[StepPredictor]],
    config: Config,
    loads: Mapping[int, ExpectedLoad],
    temperature: float,
) -> _Curves:
    return dict(zip(loads, measure(config, list(loads.values()), temperature), strict=True))


def _on(config: Config, pool: str, device: Device) -> Config:
    return config.model_copy(update={pool: getattr(config, pool).model_copy(update=device.settings)})


def _on_gpu(worker: Any, model: str, device: Device) -> StepPredictor:
    name = describe(device)
    gpu = find_gpu(name.partition(" (")[0])
    if gpu is None:
        raise ConfigurationError(f"the planner has no data sheet of {name}; it has those of {', '.join(GPUS)}")
    dtype = worker.quantization or _DTYPES[worker.dtype]
    return step_predictor(PlannedModel.parse(f"{model}:{dtype}"), GpuGroup(gpu))
