"""Measures what the rounds cost a target, with simulated engines: `python -m bench.coordination`.

Time is processor time of a step, from the threads' own clocks. It is critical if the draft or the target is idle
meanwhile. On the engine's thread that is the time from choices to advances, and from the last awaited proposal to its
drafts; the wait itself costs none. On the links' thread it is writing and reading messages. The other part, learning
and planning, runs while the drafters draft. The rest of the links' thread is transport (asyncio and gRPC) and is
reported separately. Bytes are the protobuf payload of both directions per committed token, without opens.

Between two steps both threads sleep, and other work displaces their caches. So the same code is measured again back to
back ("alone", `bench.rounds`). The difference is the cost of waking threads and filling caches.

A second part has a draft worker with room for a third of the sequences. That third has to be speculated for, and the
rest has to decode as fast as without the worker.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.in_process import SIMULATED, SimulatedCluster
from bench.result import describe_machine, write_result
from bench.rounds import RoundsTime, time_rounds
from cluster.config.file import load_config
from cluster.interpreter import keep_collections_short

BASE_MS, SEQUENCE_US = 0.1, 6.0  # the bar, for a step
MAX_BYTES = 24.0  # the bar, for a token
NUM_DRAFTS = 5
SETTINGS = (
    *SIMULATED,
    "simulation.vocab_size=128256",
    # So slow that the simulation's own work always fits, and the same for all rows, so that deeper is always better.
    "simulation.target_step_ms=[[1, 60]]",
    "simulation.draft_step_ms=[[1, 1]]",
    "simulation.acceptance=0.75",
    f"speculation.num_speculative_tokens={NUM_DRAFTS}",
    f"speculation.max_speculative_tokens={NUM_DRAFTS}",
    "speculation.draft_timeout_ms=10000",
    "target.kv_cache_bytes=8589934592",
    "target.max_num_seqs=256",
    "target.max_num_batched_tokens=4096",
    "target.max_model_len=100000",
    "draft.max_num_seqs=256",
    "draft.max_num_batched_tokens=4096",
)
WARM_UP_SECONDS = 2.0
ALONE_STEPS = 200
FOREVER = 50_000  # tokens


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a step with `num_sequences` sequences, and of a committed token."""

    num_sequences: int
    rounds_ms: float  # on the engine's thread, critical
    codec_ms: float  # on the links' thread, critical
    other_ms: float  # on the engine's thread, while the drafters draft
    transport_ms: float  # the rest of that thread
    bytes_per_token: float
    mean_drafts: float
    alone_ms: float  # the critical part on both threads, back to back
    alone_other_ms: float

    @property
    def critical_ms(self) -> float:
        return self.rounds_ms + self.codec_ms

    @property
    def bar_ms(self) -> float:
        return BASE_MS + self.num_sequences * SEQUENCE_US / 1e3


@dataclass(frozen=True, slots=True)
class Third:
    """A draft worker with room for a third of the sequences."""

    num_sequences: int
    num_speculated: int
    speculated_rate: float  # tokens per second of a sequence
    other_rate: float
    plain_rate: float  # of a sequence when there is no speculation


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.coordination", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sequences", type=lambda t: [int(n) for n in t.split(",")], default=[1, 8, 64, 256])
    parser.add_argument("--seconds", type=float, default=4.0, help="of each repeat")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("bench/results/coordination.json"))
    arguments = parser.parse_args(argv)
    keep_collections_short()  # as the programs do
    print("| | between two steps, ms | | | | | back to back, ms | | | | |")
    print(
        "| sequences | rounds | codec | critical: both (range) | other | transport | critical (range) | bar | other "
        "| bytes/token | k |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    costs: dict[int, list[Cost]] = {}
    for num_sequences in arguments.sequences:
        costs[num_sequences] = measure(num_sequences, arguments.seconds, arguments.repeats)
        print(_row(costs[num_sequences]), flush=True)
    third = measure_third(24, arguments.seconds)
    print(
        f"\nRoom for {third.num_sequences // 3} of {third.num_sequences}: {third.num_speculated} speculated for, at "
        f"{third.speculated_rate:.1f} tokens/s each; the others {third.other_rate:.1f}; without speculation "
        f"{third.plain_rate:.1f}"
    )
    result = {
        "bar": {"base_ms": BASE_MS, "sequence_us": SEQUENCE_US, "bytes_per_token": MAX_BYTES},
        "machine": describe_machine(),
        "costs": [asdict(cost) for repeats in costs.values() for cost in repeats],
        "third": asdict(third),
    }
    write_result(arguments.out, result)
    return 0


def measure(num_sequences: int, seconds: float, repeats: int) -> list[Cost]:
    costs = []
    alone = time_rounds(num_sequences, NUM_DRAFTS, ALONE_STEPS, repeats)
    with SimulatedCluster(load_config(None, SETTINGS), drafts_apart=True) as cluster:
        for _ in range(num_sequences):
            cluster.submit(FOREVER)
        time.sleep(WARM_UP_SECONDS)
        for one_alone in alone:
            before = _counters(cluster)
            time.sleep(seconds)
            grown = {name: value - before[name] for name, value in _counters(cluster).items()}
            costs.append(_cost(num_sequences, grown, one_alone))
    return costs


def _counters(cluster: SimulatedCluster) -> Mapping[str, float]:
    counters: defaultdict[str, float] = defaultdict(float)
    for reading in cluster.target.readings():
        kind = reading.labels.get("kind") or reading.labels.get("part")
        counters[f"{reading.name}:{kind}" if kind else reading.name] += reading.value
    counters["links"] = cluster.links_cpu_seconds()
    answers = list(cluster.answers.values())
    counters["drafts"] = sum(answer.num_draft_tokens for answer in answers)
    counters["rounds"] = sum(answer.num_rounds for answer in answers)
    return counters


def _cost(num_sequences: int, grown: Mapping[str, float], alone: RoundsTime) -> Cost:
    num_steps = sum(grown[f"outrider_steps:{kind}"] for kind in ("prefill", "verify", "decode"))
    codec = grown["outrider_link_codec_seconds"]
    return Cost(
        num_sequences=num_sequences,
        rounds_ms=1e3 * grown["outrider_coordination_seconds:critical"] / num_steps,
        codec_ms=1e3 * codec / num_steps,
        other_ms=1e3 * grown["outrider_coordination_seconds:other"] / num_steps,
        transport_ms=1e3 * (grown["links"] - codec) / num_steps,
        bytes_per_token=grown["outrider_link_bytes:round"] / grown["outrider_committed_tokens"],
        mean_drafts=grown["drafts"] / grown["rounds"],
        alone_ms=alone.critical_ms,
        alone_other_ms=alone.other_ms,
    )


def _row(costs: Sequence[Cost]) -> str:
    def median(name: str) -> float:
        return float(statistics.median(getattr(cost, name) for cost in costs))

    both, alone = [cost.critical_ms for cost in costs], [cost.alone_ms for cost in costs]
    return (
        f"| {costs[0].num_sequences} | {median('rounds_ms'):.3f} | {median('codec_ms'):.3f} "
        f"| {statistics.median(both):.3f} ({min(both):.3f}-{max(both):.3f}) | {median('other_ms'):.3f} "
        f"| {median('transport_ms'):.3f} "
        f"| {statistics.median(alone):.3f} ({min(alone):.3f}-{max(alone):.3f}) | {costs[0].bar_ms:.3f} "
        f"| {median('alone_other_ms'):.3f} | {median('bytes_per_token'):.1f} | {median('mean_drafts'):.1f} |"
    )


def measure_third(num_sequences: int, seconds: float) -> Third:
    """Steps take the same time however many rows they have, so that plain sequences are as fast as they were alone."""
    settings = [*SETTINGS, f"draft.max_num_seqs={num_sequences // 3}"]

    def rates(depth: int | None) -> tuple[list[float], int]:
        with SimulatedCluster(load_config(None, settings), drafts_apart=True) as cluster:
            names = [cluster.submit(FOREVER, num_speculative_tokens=depth) for _ in range(num_sequences)]
            time.sleep(WARM_UP_SECONDS)
            before = {name: len(cluster.answers[name].token_ids) for name in names}
            started_at = time.perf_counter()
            time.sleep(seconds)
            passed = time.perf_counter() - started_at
            # The fastest first: those that are speculated for.
            rates = sorted((len(cluster.answers[name].token_ids) - before[name]) / passed for name in names)[::-1]
            return rates, sum(answer.num_draft_tokens > 0 for answer in cluster.answers.values())

    drafted, num_speculated = rates(None)
    plain, _ = rates(0)
    return Third(
        num_sequences,
        num_speculated,
        statistics.median(drafted[:num_speculated]),
        statistics.median(drafted[num_speculated:]),
        statistics.median(plain),
    )


if __name__ == "__main__":
    sys.exit(main())
