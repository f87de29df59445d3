"""Replays real answers to the controller, in virtual time: `python -m bench.replay --set target.model=...`.

A cluster answers held-out prompts with the most drafts a round that it may have. The recording keeps only which tokens
the draft foresaw. Target and draft are timed as well (`services.plan.measure`). The real coordinator then runs with
these answers and step times in virtual time (`cluster.simulator`). Each depth gets the same answers in the same order,
and repeats differ only in the scatter of steps. So the controller's losses are separated from the machine's noise, and
a change to the controller is tried in a minute.

`--scatter`, `--slow-start` and `--prompt-row` set behaviour of the steps that their curve does not have.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from bench.result import describe_machine, write_result
from bench.speedup import AUTO, MEASURED, READY_TIMEOUT_SECONDS, parse_depths, spread
from bench.workload import held_out_prompts
from cluster.config import Config
from cluster.config.file import load_config
from cluster.drafters.base import DraftSequence
from cluster.drafters.simulated import SimulatedDrafter
from cluster.planning.prediction import ExpectedLoad
from cluster.simulated_engines.tokens import token_at
from cluster.simulator.drafts import SimulatedDraft
from cluster.simulator.virtual import VirtualCluster
from cluster.speculation.noise import NoiseKey
from cluster.targets.base import GenerationOutput
from cluster.targets.simulated import SimulatedTarget
from cluster.targets.token_generator import Scheduled
from services.launch.local import LocalCluster
from services.plan.measure import measure_steps

_SLOW_STEP_SHARE, _SLOW_STEP = 0.01, 2.0  # one in a hundred takes twice its time
_WARM_UP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Answer:
    prompt_len: int
    was_foreseen: tuple[bool, ...]  # each token of it, by a draft to which all before it were known


@dataclass(frozen=True, slots=True)
class Recording:
    """Recording of a pair at one temperature. Curves are pairs of rows and milliseconds."""

    temperature: float
    answers: tuple[Answer, ...]
    target_step_ms: tuple[tuple[int, float], ...]
    draft_step_ms: tuple[tuple[int, float], ...]
    machine: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Recording:
        data = json.loads(path.read_text(encoding="utf-8"))
        answers = tuple(
            Answer(answer["prompt_len"], tuple(mark == "+" for mark in answer["was_foreseen"]))
            for answer in data["answers"]
        )
        target, draft = (tuple((rows, ms) for rows, ms in data[f"{name}_step_ms"]) for name in ("target", "draft"))
        return cls(data["temperature"], answers, target, draft, data["machine"])

    def write(self, path: Path) -> None:
        marks = [
            {"prompt_len": answer.prompt_len, "was_foreseen": "".join(" +"[seen] for seen in answer.was_foreseen)}
            for answer in self.answers
        ]
        data = {
            "temperature": self.temperature,
            "target_step_ms": self.target_step_ms,
            "draft_step_ms": self.draft_step_ms,
            "machine": self.machine,
            "answers": marks,
        }
        write_result(path, data)


def record(config: Config, num_streams: int, temperature: float, num_answers: int, max_tokens: int) -> Recording:
    with LocalCluster(config) as cluster:
        cluster.wait_ready(READY_TIMEOUT_SECONDS)
        depth = config.speculation.max_speculative_tokens
        prompts = held_out_prompts(num_answers, seed=num_streams)
        answers = [
            Answer(len(prompt), _foreseen(cluster.url, prompt, seed, temperature, depth, max_tokens))
            for seed, prompt in enumerate(prompts)
        ]
    load = ExpectedLoad(num_streams, round(statistics.fmean(map(len, prompts))), max_tokens)
    times = measure_steps(config, load, temperature)
    target, draft = (tuple((rows, 1e3 * s) for rows, s in steps.points) for steps in (times.target, times.draft))
    return Recording(temperature, tuple(answers), target, draft, describe_machine())


def _foreseen(
    url: str, prompt: Sequence[int], seed: int, temperature: float, depth: int, max_tokens: int
) -> tuple[bool, ...]:
    """A draft that was accepted was foreseen, and what came in its place was not. What followed the last of a proposal
    that was accepted as a whole is taken to be like it, and a token for which nothing was drafted not to be."""
    body = {
        "prompt": list(prompt),
        "seed": seed,
        "temperature": temperature,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "num_speculative_tokens": depth,
        "return_rounds": True,
    }
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=600)
    response.raise_for_status()
    was_foreseen: list[bool] = []
    for ended in response.json()["choices"][0]["rounds"]:
        num_drafts, num_accepted = ended["num_draft_tokens"], ended["num_accepted_tokens"]
        after = [0 < num_drafts == num_accepted] * (len(ended["tokens"]) - num_accepted)
        was_foreseen += [True] * num_accepted + after
    return tuple(was_foreseen)


class RecordedDrafter(SimulatedDrafter):
    """Right where a draft was; `answers` has those of all sequences, by their noise."""

    def __init__(self, *arguments: Any, answers: dict[NoiseKey, Answer]) -> None:
        super().__init__(*arguments)
        self._answers = answers

    def _choices(self, sequence: DraftSequence, depth: int, place: int, width: int) -> list[int]:
        key, position = sequence.noise_key, sequence.num_committed + depth
        answer, token = self._answers[key], token_at(key, position, self.vocab_size)
        in_answer = position - answer.prompt_len
        is_right = in_answer < len(answer.was_foreseen) and answer.was_foreseen[in_answer]
        return [(token + other + (not is_right)) % self.vocab_size for other in range(width)]


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Behaviour of the target's steps in addition to their curve."""

    scatter: float = 0.0  # a standard deviation, of the logarithm
    slow_start: float = 1.0  # times what a step takes: how long it seemed to take at start
    prompt_row: float = 1.0  # of a choice's row


class ScatteringTarget(SimulatedTarget):
    def __init__(self, *arguments: Any, behaviour: Behaviour, seed: int) -> None:
        super().__init__(*arguments)
        self._behaviour = behaviour
        self._rng = random.Random(seed)

    def _step_seconds(self, step: Sequence[Scheduled]) -> float:
        behaviour, num_rows = self._behaviour, 0.0
        for scheduled in step:
            is_prompt = scheduled.num_new_tokens > 1
            num_rows += scheduled.num_new_tokens * (behaviour.prompt_row if is_prompt else 1) + len(scheduled.drafts)
        seconds = (self._curve.at(num_rows) + self._sequence_seconds * len(step)) * self._rng.lognormvariate(
            0.0, behaviour.scatter
        )
        is_slow = behaviour.scatter and self._rng.random() < _SLOW_STEP_SHARE
        return seconds * (_SLOW_STEP if is_slow else 1.0)

    def _time_step(self, num_rows: int) -> float | None:
        return (self._curve.at(num_rows) + self._sequence_seconds) * self._behaviour.slow_start


@dataclass(slots=True)
class Replay:
    """One depth; a figure for each seed."""

    depth: int | None  # None: the controller's
    tokens_per_second: list[float] = field(default_factory=list)
    mean_depths: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return AUTO if self.depth is None else str(self.depth)


def replay(
    recording: Recording,
    config: Config,
    num_streams: int,
    depth: int | None,
    behaviour: Behaviour,
    seconds: float,
    seed: int,
) -> tuple[float, float]:
    """Tokens a second, and drafts of a round that has some. There is one draft worker."""
    answers: dict[NoiseKey, Answer] = {}
    order = list(recording.answers)
    random.Random(seed).shuffle(order)
    simulation = config.simulation
    draft = SimulatedDraft(
        simulation,
        round_trip_seconds=simulation.round_trip_ms / 1e3,
        make_drafter=partial(RecordedDrafter, answers=answers),
    )
    num_drafted = 0  # rounds with drafts

    def submit() -> None:
        answer = order[len(answers) % len(order)]
        name = cluster.submit(len(answer.was_foreseen), prompt_len=answer.prompt_len, num_speculative_tokens=depth)
        answers[NoiseKey.derive(int(name), 0)] = answer

    def published(outputs: Sequence[GenerationOutput]) -> None:
        nonlocal num_drafted
        for output in outputs:
            num_drafted += output.num_draft_tokens > 0
            if output.finish_reason is not None:
                submit()

    make_target = partial(ScatteringTarget, behaviour=behaviour, seed=seed)
    cluster = VirtualCluster(config, [draft], published, make_target)
    for _ in range(num_streams):
        submit()
    cluster.run(_WARM_UP_SECONDS)
    drafts, rounds = cluster.num_draft_tokens, num_drafted
    rate = cluster.run(seconds)
    return rate, (cluster.num_draft_tokens - drafts) / max(1, num_drafted - rounds)


def simulated(config: Config, recording: Recording) -> Config:
    """The cluster of `config`, with engines that take the recorded times."""
    curves = {"target_step_ms": recording.target_step_ms, "draft_step_ms": recording.draft_step_ms}
    return config.model_copy(
        update={
            "target": config.target.model_copy(update={"engine": "simulated"}),
            "draft": config.draft.model_copy(update={"drafter": "simulated"}),
            "simulation": config.simulation.model_copy(update=curves),
        }
    )


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    config = load_config(arguments.config, [*MEASURED, *arguments.overrides])
    if arguments.recording is None or not arguments.recording.exists():
        streams, temperature = arguments.streams, arguments.temperature
        recording = record(config, streams, temperature, arguments.answers, arguments.max_tokens)
        if arguments.recording is not None:
            recording.write(arguments.recording)
    else:
        recording = Recording.read(arguments.recording)
    behaviour = Behaviour(arguments.scatter, arguments.slow_start, arguments.prompt_row)
    replays = [Replay(depth) for depth in arguments.depths]
    config = simulated(config, recording)
    for seed in range(arguments.repeats):
        for one in replays:
            rate, depth = replay(recording, config, arguments.streams, one.depth, behaviour, arguments.seconds, seed)
            one.tokens_per_second.append(rate)
            one.mean_depths.append(depth)
    print(f"{arguments.streams} streams, T = {recording.temperature:g}, {behaviour}\n")
    print("| k | tokens/s | of best fixed k | k verified |\n| --- | --- | --- | --- |")
    fixed = [one.tokens_per_second for one in replays if one.depth is not None]
    best = max(fixed, key=statistics.median, default=None)
    for one in replays:
        ratios = [own / other for own, other in zip(one.tokens_per_second, best or (), strict=best is not None)]
        print(
            f"| {one.name} | {spread(one.tokens_per_second)} | {spread(ratios, 3) if ratios else ''} "
            f"| {statistics.fmean(one.mean_depths):.1f} |"
        )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.replay", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", type=Path, help="YAML configuration of the cluster")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--recording", type=Path, help="read when it exists, else written")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.0, help="of a new recording")
    parser.add_argument("--answers", type=int, default=48, help="of a new recording")
    parser.add_argument("--max-tokens", type=int, default=128, help="of each")
    parser.add_argument("--depths", type=parse_depths, default=[None, 0, 3, 5], help="auto, or a fixed k each")
    parser.add_argument("--repeats", type=int, default=4, help="each with another order of answers")
    parser.add_argument("--seconds", type=float, default=30.0, help="virtual ones, after warming up")
    parser.add_argument("--scatter", type=float, default=0.07, help="of steps: a standard deviation, as a share")
    parser.add_argument("--slow-start", type=float, default=1.0, help="how many times too slow steps seemed at start")
    parser.add_argument("--prompt-row", type=float, default=1.0, help="what one costs, beside that of a draft")
    return parser


if __name__ == "__main__":
    sys.exit(main())
