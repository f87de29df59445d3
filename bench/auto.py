"""The controller's k against the best fixed k, cold and warm, in virtual time: `python -m bench.auto`.

Each case is a cluster of simulated engines. Streams ask for answers of 128 tokens, one after the other. *Cold* is the
tokens per second of the first answers of a target that has just started; *warm* is that of later answers. The best
fixed k is picked on the even repeats and compared on the odd ones. Steps scatter by 7 %, and one in a hundred takes
twice its time.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from bench.in_process import SIMULATED
from bench.replay import Behaviour, ScatteringTarget
from cluster.config.file import load_config
from cluster.simulator.drafts import HAND_OVER_SECONDS, SimulatedDraft
from cluster.simulator.virtual import VirtualCluster
from cluster.targets.base import GenerationOutput

ANSWER_TOKENS = 128
DEPTHS = (0, 2, 3, 4, 6, 8)
STREAMS = (1, 4, 16, 64)
COLD_BAR, WARM_BAR, FLOOR_BAR = 0.93, 0.97, 0.97
_SCATTER = Behaviour(scatter=0.07)
_WARM_ANSWERS = 4  # of each stream, after the cold one


@dataclass(frozen=True, slots=True)
class Case:
    """A cluster of simulated engines; times in milliseconds, acceptance 0.6 at every position unless given."""

    name: str
    target_step_ms: str
    draft_step_ms: str
    round_trip_ms: float | None  # None: the draft is in the target's process, which hands nothing over
    streams: Sequence[int] = STREAMS
    acceptance: float = 0.6


CASES = (
    Case(
        "GPU, draft beside it",
        "[[1,3],[64,3],[128,3.8],[512,9]]",
        "[[1,0.5],[64,0.5],[512,1]]",
        None,
    ),
    Case("remote draft, 2 ms away", "[[1,25],[64,26],[128,34],[512,90]]", "[[1,1],[64,1.5],[512,4]]", 2.0),
    Case("large target", "[[1,100],[64,105],[128,130],[512,330]]", "[[1,4],[64,6],[512,16]]", 0.5),
    # The bundled pair on two cores of a Zen 4 EPYC, draft in the target's process.
    Case(
        "bundled pair",
        "[[1,0.75],[4,0.95],[8,1.2],[16,1.75],[24,2.4],[32,3.1],[64,5.8]]",
        "[[1,0.25],[4,0.32],[8,0.4],[16,0.6]]",
        None,
        streams=(1, 4),
        acceptance=0.75,
    ),
)


def run(case: Case, num_streams: int, num_speculative_tokens: int | None, seed: int) -> tuple[float, float]:
    """Tokens per second, cold and warm. `num_speculative_tokens`: None leaves it to the controller."""
    settings = {
        "simulation.acceptance": case.acceptance,
        "simulation.target_step_ms": case.target_step_ms,
        "simulation.draft_step_ms": case.draft_step_ms,
        "target.max_num_seqs": 64,
        "target.max_num_batched_tokens": 1024,
        "draft.max_num_batched_tokens": 1024,
    }
    if case.round_trip_ms is None:
        settings["speculation.max_run_ahead"] = 0
    config = load_config(None, [*SIMULATED, *(f"{key}={value}" for key, value in settings.items())])
    draft = SimulatedDraft(
        config.simulation,
        round_trip_seconds=(case.round_trip_ms or 0.0) / 1e3,
        hand_over_seconds=0.0 if case.round_trip_ms is None else HAND_OVER_SECONDS,
    )
    num_answers = 0

    def submit() -> None:
        cluster.submit(ANSWER_TOKENS, prompt_len=32, num_speculative_tokens=num_speculative_tokens)

    def published(outputs: Sequence[GenerationOutput]) -> None:
        nonlocal num_answers
        for output in outputs:
            if output.finish_reason is not None:
                num_answers += 1
                submit()

    make_target = partial(ScatteringTarget, behaviour=_SCATTER, seed=seed)
    cluster = VirtualCluster(config, [draft], published, make_target, seeds=itertools.count(100_000 * seed))
    for _ in range(num_streams):
        submit()
    rates = []
    for answers in (1, _WARM_ANSWERS):
        started_at, tokens, until = cluster.time.now(), cluster.num_tokens, num_answers + answers * num_streams
        while num_answers < until:
            cluster.step()
        rates.append((cluster.num_tokens - tokens) / (cluster.time.now() - started_at))
    return rates[0], rates[1]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.auto", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains this")
    arguments = parser.parse_args(argv)
    print("| case | streams | best k | cold | over k = 0 | best k | warm | over k = 0 | auto, tokens/s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    misses = 0
    for case in CASES:
        for num_streams in case.streams if arguments.only in case.name else ():
            repeats = max(arguments.repeats, 32 // num_streams)
            rates = {k: [run(case, num_streams, k, seed) for seed in range(repeats)] for k in (None, *DEPTHS)}
            cells = []
            for part, bar in enumerate((COLD_BAR, WARM_BAR)):
                of = {k: [rate[part] for rate in found] for k, found in rates.items()}
                best = max(DEPTHS, key=lambda k: statistics.median(of[k][::2]))
                auto = statistics.median(of[None])
                over_best = statistics.median(of[None][1::2]) / statistics.median(of[best][1::2])
                over_none = auto / statistics.median(of[0])
                misses += (over_best < bar) + (over_none < FLOOR_BAR)
                cells.append(f"{best} | {over_best:.3f} | {over_none:.3f}")
            print(f"| {case.name} | {num_streams} | {' | '.join(cells)} | {auto:.0f} |", flush=True)
    print(f"\n{misses} under their bars of {COLD_BAR}, {WARM_BAR} and {FLOOR_BAR}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
