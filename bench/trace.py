"""Runs traces of changing load and acceptance, with simulated engines: `python -m bench.trace`.

Two traces have three phases each: acceptance 0.9, 0.3, 0.9 at four streams, and 1, 64, 1 streams at acceptance 0.75.
Each runs with the controller's k and with an oracle. The oracle is given the curves and the acceptance. It computes the
k of each phase that commits most, and its requests ask for that k. Regret is the share of the oracle's tokens that the
controller's run lacks. The plot shows k and goodput over time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "outrider"  # the same picture gives the same file

from matplotlib import pyplot as plt  # noqa: E402 (the backend is chosen first)
from matplotlib.axes import Axes  # noqa: E402

from bench.in_process import SIMULATED, SimulatedCluster  # noqa: E402
from bench.machine import describe_machine  # noqa: E402
from cluster.config import Config  # noqa: E402
from cluster.config.file import load_config  # noqa: E402
from cluster.simulated_engines.steps import StepCurve  # noqa: E402
from cluster.targets.base import GenerationOutput  # noqa: E402

MAX_REGRET = 0.1
BIN_SECONDS = 1.0
FOREVER = 50_000  # tokens
PROMPT_LEN = 8  # 64 at once are a step of the target like any other
HAND_OVER_SECONDS = 0.002  # of a round between two processes of one machine: the oracle allows for it
SETTINGS = (
    *SIMULATED,
    "target.kv_cache_bytes=8589934592",
    "target.max_num_batched_tokens=2048",
    "target.max_model_len=100000",
    "draft.max_num_batched_tokens=2048",
)


@dataclass(frozen=True, slots=True)
class Phase:
    num_streams: int
    acceptance: float

    def best_depth(self, config: Config) -> int:
        """The k with the most committed tokens over time when nothing is drafted ahead."""
        simulation = config.simulation
        target, draft = StepCurve(simulation.target_step_ms), StepCurve(simulation.draft_step_ms)

        def goodput(depth: int) -> float:
            tokens = sum(self.acceptance**place for place in range(depth + 1))
            wait = depth * draft.at(self.num_streams) + HAND_OVER_SECONDS if depth else 0.0
            return tokens / (target.at(self.num_streams * (1 + depth)) + wait)

        return max(range(config.speculation.max_speculative_tokens + 1), key=goodput)


TRACES = {
    "acceptance 0.9, 0.3, 0.9": (Phase(4, 0.9), Phase(4, 0.3), Phase(4, 0.9)),
    "streams 1, 64, 1": (Phase(1, 0.75), Phase(64, 0.75), Phase(1, 0.75)),
}


@dataclass(slots=True)
class Course:
    """Committed and drafted tokens of one run, in bins of `BIN_SECONDS`."""

    tokens: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)  # sequences in steps

    def add(self, seconds: float, outputs: Sequence[GenerationOutput]) -> None:
        index = int(seconds / BIN_SECONDS)
        for column in (self.tokens, self.drafts, self.rounds):
            column.extend([0] * (index + 1 - len(column)))
        for output in outputs:
            self.tokens[index] += len(output.token_ids)
            self.drafts[index] += output.num_draft_tokens
            self.rounds[index] += 1

    def tokens_of(self, phase: int, phase_seconds: float) -> int:
        per_phase = round(phase_seconds / BIN_SECONDS)
        return sum(self.tokens[phase * per_phase : (phase + 1) * per_phase])

    @property
    def depths(self) -> list[float]:
        return [drafts / max(rounds, 1) for drafts, rounds in zip(self.drafts, self.rounds, strict=True)]


def run(phases: Sequence[Phase], phase_seconds: float, depths: Sequence[int | None]) -> Course:
    """Runs the trace; `depths` has what the requests of each phase ask for."""
    acceptances = [[number * phase_seconds, phase.acceptance] for number, phase in enumerate(phases)]
    config = load_config(None, [*SETTINGS, f"simulation.acceptance_schedule={acceptances}"])
    course, names, asked = Course(), list[str](), None
    with SimulatedCluster(config) as cluster:
        started_at = time.perf_counter()
        cluster.on_step = lambda outputs: course.add(time.perf_counter() - started_at, outputs)
        for number, (phase, depth) in enumerate(zip(phases, depths, strict=True)):
            if depth != asked:  # a request asks once: streams with another k are others
                for name in names:
                    cluster.abort(name)
                names, asked = [], depth
            while len(names) > phase.num_streams:
                cluster.abort(names.pop())
            while len(names) < phase.num_streams:
                names.append(cluster.submit(FOREVER, num_speculative_tokens=depth, prompt_len=PROMPT_LEN))
            time.sleep(max(0.0, started_at + (number + 1) * phase_seconds - time.perf_counter()))
        cluster.on_step = None
    return course


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.trace", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--phase-seconds", type=float, default=20.0, help="a multiple of a second")
    parser.add_argument("--out", type=Path, default=Path("bench/results/trace.json"), help="the plot goes beside it")
    arguments = parser.parse_args(argv)
    seconds = arguments.phase_seconds
    print("| trace | phase | k of the oracle | mean k | tokens/s of the oracle | tokens/s | regret |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    courses, results = {}, []
    for name, phases in TRACES.items():
        depths = [phase.best_depth(load_config(None, SETTINGS)) for phase in phases]
        oracle, auto = run(phases, seconds, depths), run(phases, seconds, [None] * len(phases))
        courses[name] = oracle, auto
        for number in range(len(phases)):
            best, own = oracle.tokens_of(number, seconds), auto.tokens_of(number, seconds)
            span = slice(round(number * seconds / BIN_SECONDS), round((number + 1) * seconds / BIN_SECONDS))
            mean_depth = sum(auto.drafts[span]) / max(sum(auto.rounds[span]), 1)
            print(
                f"| {name} | {number + 1} | {depths[number]} | {mean_depth:.1f} | {best / seconds:.0f} "
                f"| {own / seconds:.0f} | {1 - own / best:.1%} |",
                flush=True,
            )
        regret = 1 - sum(auto.tokens) / sum(oracle.tokens)
        print(
            f"| {name} | all | | | | | {regret:.1%} ({'under' if regret < MAX_REGRET else 'over'} the bar) |",
            flush=True,
        )
        results.append(
            {
                "trace": name,
                "phases": [asdict(phase) for phase in phases],
                "oracle_depths": depths,
                "regret": regret,
                "oracle": asdict(oracle),
                "controller": asdict(auto),
            }
        )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "max_regret": MAX_REGRET,
        "phase_seconds": seconds,
        "simulation": Config().simulation.model_dump(mode="json"),
        "machine": describe_machine(),
        "traces": results,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    plot(courses, seconds, arguments.out.with_suffix(".svg"))
    return 0


def plot(courses: dict[str, tuple[Course, Course]], phase_seconds: float, picture: Path) -> None:
    """k above goodput, a column a trace."""
    figure, grid = plt.subplots(2, len(courses), figsize=(4.5 * len(courses), 4.6), sharex=True, squeeze=False)
    for column, (name, (oracle, auto)) in enumerate(courses.items()):
        depth_axes, rate_axes = grid[0][column], grid[1][column]
        depth_axes.set(title=name, ylabel="k, mean over sequences")
        rate_axes.set(ylabel="committed tokens/s", xlabel="seconds")
        _draw(depth_axes, oracle.depths, auto.depths)
        _draw(rate_axes, *[[tokens / BIN_SECONDS for tokens in course.tokens] for course in (oracle, auto)])
        for axes in (depth_axes, rate_axes):
            for number in (1, 2):
                axes.axvline(number * phase_seconds, color="grey", linewidth=0.8, linestyle=":")
    grid[0][0].legend(frameon=False, fontsize=7)
    figure.suptitle("simulated engines", fontsize=9)
    figure.tight_layout()
    figure.savefig(picture, metadata={"Date": None})
    plt.close(figure)


def _draw(axes: Axes, oracle: Sequence[float], auto: Sequence[float]) -> None:
    axes.plot(
        [BIN_SECONDS * (i + 0.5) for i in range(len(oracle))], oracle, color="grey", linewidth=0.9, label="oracle"
    )
    axes.plot([BIN_SECONDS * (i + 0.5) for i in range(len(auto))], auto, color="black", label="controller")
    axes.set_ylim(0, None)


if __name__ == "__main__":
    sys.exit(main())
