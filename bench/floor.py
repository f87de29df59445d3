"""Whether the controller ever costs speed where requests come and go: `python -m bench.floor`.

The cases of `bench.capacity` (a 70B target, a 1B draft on an A10G at several round trips, prompts of 128 tokens,
answers of 32 to 96), in virtual time: tokens a second with k as the controller chooses it, over those without
speculation.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
from collections.abc import Sequence

from bench.capacity import PLAIN, Case, make_cases
from cluster.engine.memory_plan import PlannedModel
from cluster.planning.hardware import parse_gpus
from cluster.planning.planner import Load, plan
from cluster.planning.steps import Roofline
from cluster.simulator.virtual import VirtualCluster
from cluster.targets.base import GenerationOutput

BAR = 0.97
CASES = (PLAIN, "pool, 0.2 ms away", "pool, 2 ms away", "pool, 10 ms away")
_SCALE = 3.0  # of all times, as in `bench.capacity`: not for this machine's sake, but to be compared with it
_WARM_UP_SHARE = 0.3


def cases() -> dict[str, Case]:
    target = Roofline(PlannedModel.parse("70B"), parse_gpus("4xA100-80"))
    made = make_cases(target, PlannedModel.parse("1B"), parse_gpus("A10G"), 0.82)
    return {case.option.name: case for case in made if case.option.name in CASES}


def run(case: Case, num_clients: int, seconds: float = 120.0, seed: int = 0) -> tuple[float, float]:
    """Tokens a second, as without the scale, and the mean k. A client asks again within a round."""
    load = Load(num_clients, prompt_tokens=128, answer_tokens=64)
    planned = plan(case.option, load)
    cluster, rng = VirtualCluster(case.config(load, planned, _SCALE)), random.Random(seed)
    due = sorted(rng.random() * 0.2 * _WARM_UP_SHARE * seconds for _ in range(num_clients))

    def ask_again(outputs: Sequence[GenerationOutput]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                heapq.heappush(due, cluster.time.now() + rng.random() * _SCALE * planned.round.seconds)

    def go_on(until: float) -> None:
        while cluster.time.now() < until:
            while due and due[0] <= cluster.time.now():
                heapq.heappop(due)
                cluster.submit(rng.randint(32, 96), prompt_len=load.prompt_tokens)
            if not cluster.step():
                cluster.time.sleep_until(due[0])

    cluster.on_step = ask_again
    go_on(_WARM_UP_SHARE * seconds)
    started_at, before = cluster.time.now(), (cluster.num_tokens, cluster.num_draft_tokens, cluster.num_rounds)
    go_on(seconds)
    after = cluster.num_tokens, cluster.num_draft_tokens, cluster.num_rounds
    tokens, drafts, rounds = (now - then for now, then in zip(after, before, strict=True))
    return _SCALE * tokens / (cluster.time.now() - started_at), drafts / rounds


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.floor", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clients", type=lambda t: [int(n) for n in t.split(",")], default=[8, 16, 32, 48, 64])
    parser.add_argument("--seeds", type=int, default=1, help="runs of each, of which the mean is shown")
    arguments = parser.parse_args(argv)
    print("tokens a second (over no speculation; k)\n")
    print(f"| clients | {' | '.join(CASES)} |\n|{' --- |' * (len(CASES) + 1)}")
    worst = 1.0
    for num_clients in arguments.clients:
        row, plain = [], 0.0
        for case in cases().values():
            runs = [run(case, num_clients, seed=seed) for seed in range(arguments.seeds)]
            rate, depth = (sum(values) / len(runs) for values in zip(*runs, strict=True))
            plain = plain or rate
            worst = min(worst, rate / plain)
            row.append(f"{rate:.0f} ({rate / plain:.2f}; {depth:.1f})")
        print(f"| {num_clients} | {' | '.join(row)} |", flush=True)
    print(f"\nthe least is {worst:.3f}, {'over' if worst >= BAR else 'under'} the bar of {BAR}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
