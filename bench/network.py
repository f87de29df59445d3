"""Measures the effect of the network and of a slow draft, with simulated engines: `python -m bench.network`.

Every case is a cluster of its own. Cases are round trips of 0 to 50 ms and a loss of 1 % between target and draft, and
a draft that is 2, 5 and 20 times slower. The delaying proxy adds the round trips and losses; its docstring defines a
loss. The engines' curves resemble those of the 190M pair (`bench.models`) on two cores. Streams run with k = 0 and with
the controller's k in turn, so that a drift of the machine affects both equally. Only tokens that come while all streams
are busy count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.in_process import SIMULATED
from bench.result import describe_machine, write_result
from bench.workload import read_counters, run_window
from cluster.config import Config
from cluster.config.file import load_config
from services.launch.local import LocalCluster

FLOOR = 0.97  # of the speed without speculation
ROUND_TRIPS_MS = (0.0, 0.5, 2.0, 10.0, 50.0)
LOSS = 0.01
SLOWDOWNS = (2, 5, 20)
ACCEPTANCE = 0.75
MAX_TOKENS = 192
PROMPT_LEN = 16  # a simulated target takes as long for a prompt as a real one, which is not what is measured here
READY_TIMEOUT_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    round_trip_ms: float = 0.0
    loss: float = 0.0
    slowdown: float = 1.0  # of the draft

    def config(self, overrides: Sequence[str]) -> Config:
        points = [[rows, ms * self.slowdown] for rows, ms in Config().simulation.draft_step_ms]
        own = (
            f"simulation.draft_step_ms={points}",
            f"simulation.round_trip_ms={self.round_trip_ms}",
            f"simulation.loss={self.loss}",
            f"simulation.acceptance={ACCEPTANCE}",
        )
        return load_config(None, [*SIMULATED, "router.port=0", *own, *overrides])


CASES = (
    *(Case(f"round trip {ms:g} ms", round_trip_ms=ms) for ms in ROUND_TRIPS_MS),
    Case("loss 1 %, 2 ms", round_trip_ms=2.0, loss=LOSS),
    *(Case(f"draft {times} times slower", slowdown=times) for times in SLOWDOWNS),
)


@dataclass(frozen=True, slots=True)
class Result:
    case: Case
    num_streams: int
    plain: list[float]  # tokens per second, of each repeat
    speculative: list[float]
    mean_depth: float  # k chosen
    late_rounds: float  # of a thousand steps, those that gave up waiting
    wait_ms: float  # for proposals, a step

    @property
    def speedups(self) -> list[float]:
        return [own / plain for own, plain in zip(self.speculative, self.plain, strict=True)]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    print("| case | streams | tokens/s without | with | speed-up (range) | k chosen | wait ms | late steps of 1,000 |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    results: list[Result] = []
    for case in (case for case in CASES if arguments.only in case.name):
        own = measure(case, arguments)
        results += own
        print("\n".join(map(_row, own)), flush=True)
    lowest = min(results, key=lambda result: statistics.median(result.speedups))
    met = statistics.median(lowest.speedups) >= FLOOR
    print(
        f"\nLowest: {statistics.median(lowest.speedups):.3f} at {lowest.case.name}, {lowest.num_streams} streams; ",
        end="",
    )
    print(f"the bar of {FLOOR} is {'met' if met else 'missed'}")
    result = {
        "floor": FLOOR,
        "simulation": Config().simulation.model_dump(mode="json") | {"acceptance": ACCEPTANCE},
        "machine": describe_machine(),
        "results": [asdict(result) | {"speedups": result.speedups} for result in results],
    }
    write_result(arguments.out, result)
    return 0


def measure(case: Case, arguments: argparse.Namespace) -> list[Result]:
    results = []
    with LocalCluster(case.config(arguments.overrides)) as cluster:
        cluster.wait_ready(READY_TIMEOUT_SECONDS)
        for num_streams in arguments.streams:
            results.append(_measure(cluster, case, num_streams, arguments.repeats, arguments.seconds))
    return results


def _measure(cluster: LocalCluster, case: Case, num_streams: int, repeats: int, seconds: float) -> Result:
    def run(depth: int | None) -> float:
        prompts = [[(7 * number + place) % 4000 for place in range(PROMPT_LEN)] for number in range(4 * num_streams)]
        done = run_window(
            cluster.url,
            prompts,
            num_streams=num_streams,
            temperature=1.0,
            num_speculative_tokens=depth,
            max_tokens=MAX_TOKENS,
            seconds=seconds,
        )
        return done.tokens_per_second

    run(0)
    run(None)  # what was learned of other numbers of streams is out of date
    plain, speculative, grown = [], [], Counter[str]()
    for _ in range(repeats):
        plain.append(run(0))
        before = read_counters(cluster.targets[0].metrics_url)
        speculative.append(run(None))
        after = read_counters(cluster.targets[0].metrics_url)
        grown.update({name: value - before.get(name, 0.0) for name, value in after.items()})
    depths = {
        int(name.partition(":")[2]): n for name, n in grown.items() if name.startswith("outrider_chosen_depths_total:")
    }
    steps = max(grown["outrider_steps_total"], 1.0)
    return Result(
        case,
        num_streams,
        plain,
        speculative,
        mean_depth=sum(depth * n for depth, n in depths.items()) / max(sum(depths.values()), 1.0),
        late_rounds=1e3 * grown["outrider_late_rounds_total"] / steps,
        wait_ms=1e3 * grown["outrider_proposal_wait_seconds_total"] / steps,
    )


def _row(result: Result) -> str:
    speedups = result.speedups
    return (
        f"| {result.case.name} | {result.num_streams} | {statistics.median(result.plain):.0f} "
        f"| {statistics.median(result.speculative):.0f} | {statistics.median(speedups):.2f} "
        f"({min(speedups):.2f}-{max(speedups):.2f}) | {result.mean_depth:.1f} | {result.wait_ms:.1f} "
        f"| {result.late_rounds:.1f} |"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.network", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=lambda t: [int(n) for n in t.split(",")], default=[1, 8])
    parser.add_argument("--only", default="", help="only the cases whose names have this in them")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each repeat")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--out", type=Path, default=Path("bench/results/network.json"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
