"""Kills, freezes, cuts off, slows down, drains and restarts programs under load: `python -m bench.faults`.

Two routers, two targets and two drafts are started one by one. Streams ask the same questions all the time. Their
answers are compared, token for token, with a run without a fault. The longest pause is the longest time that any stream
waited for its first or next tokens, including detection and recomputation. A client of a router that fails repeats its
request at the other one with the same seed; such requests are counted separately.

`--launcher ray` does the same on a Ray cluster of several nodes on this machine, with Ray's faults: lost and drained
nodes, drafts scaled up and down, a rolling update. The bench does not restart lost programs, because Ray has to.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.fault_cluster import KINDS, FaultCluster, Kind, Network, make_network
from bench.fault_load import Question, Row, make_questions, print_head, print_row, row_of, under_load
from bench.result import describe_machine, write_result
from cluster.config import Config
from cluster.config.file import load_config

MAX_PAUSE_SECONDS = 5.0  # the bar
SETTINGS = {
    "simulated": (
        "target.engine=simulated",
        "draft.drafter=simulated",
        "simulation.target_step_ms=[[1, 20], [64, 30]]",
    ),
    "torch": ("target.threads=1", "draft.threads=1", "target.numerics=invariant"),
}


@dataclass(frozen=True, slots=True)
class Durations:
    """Durations of a fault's phases, in seconds."""

    lead: float = 1.5  # before a fault, and after it
    lost: float = 8.0  # a program is frozen, or cut off
    slow: float = 8.0  # it runs a third of the time
    restart: float = 1.5  # after its end


SHORT = Durations(lead=0.5, lost=5.0, slow=2.0, restart=0.5)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.faults", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", choices=tuple(SETTINGS), default="simulated")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=120)
    parser.add_argument("--faults", type=lambda text: text.split(","), default=None, help="of them; default: all")
    parser.add_argument("--victims", type=lambda text: text.split(","), default=list(KINDS))
    parser.add_argument("--launcher", choices=("none", "ray"), default="none")
    parser.add_argument("--short", action="store_true", help="faults that last as long as they must to be noticed")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args(argv)
    questions = make_questions(arguments.streams, arguments.max_tokens)
    if arguments.launcher == "ray":
        from bench.fault_ray import measure_on_ray

        where = "a Ray cluster of five nodes, loopback"
        print(f"{arguments.engine} engines, {arguments.streams} streams, {where}\n")
        rows = measure_on_ray(SETTINGS[arguments.engine], questions, arguments.faults)
    else:
        network = make_network()
        where = network.what
        print(f"{arguments.engine} engines, {arguments.streams} streams, {where}\n")
        try:
            rows = measure(load_config(None, SETTINGS[arguments.engine]), network, questions, arguments)
        finally:
            network.close()
    suffix = "-ray" if arguments.launcher == "ray" else ""
    out = arguments.out or Path(f"bench/results/faults-{arguments.engine}{suffix}.json")
    result = {
        "machine": describe_machine(),
        "network": where,
        "streams": arguments.streams,
        "bar": {"pause_s": MAX_PAUSE_SECONDS},
        "rows": [{name: getattr(row, name) for name in Row.__slots__} for row in rows],
    }
    write_result(out, result)
    return int(any(row.num_failed or row.num_different_tokens for row in rows))


def measure(
    config: Config, network: Network, questions: Sequence[Question], arguments: argparse.Namespace
) -> list[Row]:
    """The rows, each printed as soon as it is there."""
    rows = []
    print_head()
    durations = SHORT if arguments.short else Durations()
    with FaultCluster(config, network) as cluster:
        calm, _ = under_load(cluster.urls, questions, None, lambda: _nothing(durations), durations.lead)
        rows.append(row_of("none", "", calm, ""))
        print_row(rows[-1])
        for name in arguments.faults or FAULTS:
            for victim in arguments.victims:
                tally, note = under_load(
                    cluster.urls,
                    questions,
                    calm.answers,
                    partial(FAULTS[name], cluster, victim, durations),
                    durations.lead,
                    may_change_router=victim == "router",
                )
                rows.append(row_of(name, victim, tally, note))
                print_row(rows[-1])
                cluster.wait_ready()
    return rows


Fault = Callable[[FaultCluster, Kind, Durations], str]
"""Does something to a cluster, for as long as that takes; returns what is worth noting."""


def _nothing(durations: Durations) -> str:
    time.sleep(durations.lead)
    return ""


def _kill(cluster: FaultCluster, kind: Kind, durations: Durations) -> str:
    victim = cluster.programs[kind][0]
    victim.signal(signal.SIGKILL)
    time.sleep(durations.restart)
    victim.child.start()
    cluster.wait_ready()
    return ""


def _freeze(cluster: FaultCluster, kind: Kind, durations: Durations) -> str:
    victim = cluster.programs[kind][0]
    victim.signal(signal.SIGSTOP)
    time.sleep(durations.lost)
    victim.signal(signal.SIGCONT)
    cluster.wait_ready()
    return ""


def _cut(cluster: FaultCluster, kind: Kind, durations: Durations) -> str:
    victim = cluster.programs[kind][0]
    cluster.network.cut(victim.place)
    time.sleep(durations.lost)
    cluster.network.heal(victim.place)
    cluster.wait_ready()
    return ""


def _slow(cluster: FaultCluster, kind: Kind, durations: Durations) -> str:
    """It runs a third of the time."""
    victim, until = cluster.programs[kind][0], time.monotonic() + durations.slow
    while time.monotonic() < until:
        victim.signal(signal.SIGSTOP)
        time.sleep(0.1)
        victim.signal(signal.SIGCONT)
        time.sleep(0.05)
    return ""


def _drain(cluster: FaultCluster, kind: Kind, durations: Durations) -> str:
    victim = cluster.programs[kind][0]
    started_at = time.monotonic()
    code = victim.drain()
    note = f"exit {code} after {time.monotonic() - started_at:.1f} s"
    time.sleep(durations.restart)
    victim.child.start()
    cluster.wait_ready()
    return note


def _roll(cluster: FaultCluster, kind: Kind, durations: Durations) -> str:
    codes = []
    for victim in cluster.programs[kind]:
        codes.append(victim.drain())
        victim.child.start()
        cluster.wait_ready()
    return f"exits {', '.join(map(str, codes))}"


FAULTS: dict[str, Fault] = {
    "kill": _kill,
    "freeze": _freeze,
    "cut off": _cut,
    "slow": _slow,
    "drain": _drain,
    "rolling restart": _roll,
}


if __name__ == "__main__":
    sys.exit(main())
