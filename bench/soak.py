"""Half an hour of random faults and cancelled requests: `python -m bench.soak`.

The programs with index 0 are killed, frozen, cut off, slowed down and drained, at random. Those with index 1 are only
frozen, cut off and slowed down, so that they live from the beginning to the end: their memory and file descriptors are
compared. At the end nothing may be in use on any worker.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from bench.fault_cluster import KINDS, FaultCluster, Program, make_network
from bench.fault_load import Clients, Question
from bench.faults import FAULTS, SETTINGS, Durations
from bench.result import describe_machine, write_result
from bench.workload import read_counters
from cluster.config.file import load_config

_METRICS_PORT = 9100
_SURVIVABLE = ("freeze", "cut off", "slow")
_SETTLE_SECONDS = 20.0  # for what was begun to end
_PAUSE_SECONDS = 2.0
_IN_USE = (
    "outrider_kv_blocks_used",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "outrider_draft_sequences",
)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory and descriptors of one program."""

    name: str
    rss_mib: float
    num_descriptors: int


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", choices=tuple(SETTINGS), default="simulated")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("bench/results/soak.json"))
    arguments = parser.parse_args(argv)
    metrics = ("target.metrics_host=0.0.0.0", "draft.metrics_host=0.0.0.0")
    ports = (f"target.metrics_port={_METRICS_PORT}", f"draft.metrics_port={_METRICS_PORT}")
    network = make_network()
    if network.what.startswith("loopback"):
        metrics, ports = (), ()  # one port would be all programs'; there, what is in use is not read
    try:
        config = load_config(None, [*SETTINGS[arguments.engine], *metrics, *ports])
        with FaultCluster(config, network) as cluster:
            result = soak(cluster, arguments, has_metrics=bool(ports))
    finally:
        network.close()
    write_result(arguments.out, {"machine": describe_machine(), **result})
    return int(result["failed"] or result["different_tokens"] or any(result["in_use"].values()))


def soak(cluster: FaultCluster, arguments: argparse.Namespace, *, has_metrics: bool) -> dict[str, object]:
    rng = random.Random(arguments.seed)
    questions = [
        Question([3 + (89 * n + place) % 4000 for place in range(40)], n, 100) for n in range(arguments.streams)
    ]
    calm = Clients(cluster.urls, questions, None, may_change_router=False)
    calm.stop()  # each is asked once
    asyncio.run(calm.run())
    clients = Clients(cluster.urls, questions, calm.tally.answers, may_change_router=True)
    leaving = _Leaving(cluster.urls, arguments.seed)
    threads = [threading.Thread(target=lambda: asyncio.run(clients.run())), threading.Thread(target=leaving.run)]
    for thread in threads:
        thread.start()
    time.sleep(30.0)  # caches and pools fill
    before = _footprints(cluster)
    faults: Counter[str] = Counter()
    until = time.monotonic() + 60 * arguments.minutes
    while time.monotonic() < until:
        kind = rng.choice(KINDS)
        survives = rng.random() < 0.5
        name = rng.choice(_SURVIVABLE if survives else tuple(FAULTS)[:-1])
        # What a fault does, it does to the first.
        programs = cluster.programs[kind]
        ordered = programs[::-1] if survives else list(programs)
        cluster.programs[kind], kept = ordered, programs
        FAULTS[name](cluster, kind, Durations())
        cluster.programs[kind] = kept
        faults[f"{name} {kind}"] += 1
        time.sleep(_PAUSE_SECONDS)
        print(
            f"{(until - time.monotonic()) / 60:5.1f} min left: {name} {ordered[0].child.name}; {clients.tally}"[:160],
            flush=True,
        )
    clients.stop()
    leaving.stop()
    for thread in threads:
        thread.join()
    time.sleep(_SETTLE_SECONDS)
    after = _footprints(cluster)
    in_use = _in_use(cluster) if has_metrics else {}
    tally = clients.tally
    print("\n| program | memory MiB before | after | descriptors before | after |\n| --- | --- | --- | --- | --- |")
    for one, other in zip(before, after, strict=True):
        memory = f"{one.rss_mib:.0f} | {other.rss_mib:.0f}"
        print(f"| {one.name} | {memory} | {one.num_descriptors} | {other.num_descriptors} |")
    print(
        f"\n{sum(faults.values())} faults; {tally.num_sent} requests, {tally.num_failed} failed, "
        f"{tally.num_different_tokens} different tokens, {leaving.num_left} left by their clients; in use: {in_use}"
    )
    return {
        "faults": dict(faults),
        "sent": tally.num_sent,
        "failed": tally.num_failed,
        "errors": dict(tally.errors),
        "asked_again": tally.num_asked_again,
        "different_tokens": tally.num_different_tokens,
        "cancelled": leaving.num_left,
        "before": [asdict(one) for one in before],
        "after": [asdict(one) for one in after],
        "in_use": in_use,
    }


class _Leaving:
    """Client that disconnects before the answer, in the middle of it or while it waits."""

    def __init__(self, urls: Sequence[str], seed: int) -> None:
        self.num_left = 0
        self._urls = urls
        self._rng = random.Random(seed)
        self._stopping = threading.Event()

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> None:
        while not self._stopping.wait(0.05):
            body = {"prompt": [self._rng.randrange(3, 4000)], "max_tokens": 500, "ignore_eos": True, "stream": True}
            url = f"{self._rng.choice(self._urls)}/v1/completions"
            try:
                with httpx.stream("POST", url, json=body, timeout=self._rng.choice((0.02, 2.0))) as response:
                    lines = response.iter_lines()
                    for _ in range(self._rng.randrange(12)):
                        next(lines)
            except (httpx.HTTPError, StopIteration):
                pass
            self.num_left += 1


def _footprints(cluster: FaultCluster) -> list[Footprint]:
    """Returns the footprints of the programs that run all the time."""
    return [_footprint(cluster.programs[kind][1]) for kind in KINDS]


def _footprint(program: Program) -> Footprint:
    process = Path(f"/proc/{program.child.pid}")
    pages = int((process / "statm").read_text().split()[1])
    rss = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return Footprint(f"{program.kind} 1", round(rss, 1), len(list((process / "fd").iterdir())))


def _in_use(cluster: FaultCluster) -> dict[str, float]:
    """Returns the resources in use, summed over all workers, by metric."""
    totals: Counter[str] = Counter()
    for kind in ("target", "draft"):
        for program in cluster.programs[kind]:
            host = program.place.called.rpartition(":")[0]
            counters = read_counters(f"http://{host}:{_METRICS_PORT}/metrics")
            totals.update({name: counters[name] for name in _IN_USE if name in counters})
    return dict(totals)


if __name__ == "__main__":
    sys.exit(main())
