"""Latency with speculation and without at the same load: `python -m bench.equal_load --engine vllm`.

Requests arrive as a Poisson process, at shares of what the cluster can do without speculation. The same requests arrive
at the same times, on the same cluster, in turn with k = 0 and with what the controller chooses.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.machine import describe_machine
from bench.models import make_pair
from bench.workload import held_out_prompts, p99
from cluster.config.file import load_config
from services.launch.local import LocalCluster
from services.prove.client import RequestBurst, ask_all

READY_SECONDS = 300.0
NUM_STREAMS = 64  # as many as may be under way
MAX_TOKENS = 64
_WAYS = ("0", "auto")


@dataclass(frozen=True, slots=True)
class Latency:
    """Latencies of one run, in seconds."""

    first_token_median: float
    first_token_p99: float
    gap_median: float
    gap_p99: float  # between tokens; those of one piece come together
    time_per_token_p99: float  # of an answer after its first token


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.equal_load", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", default="torch", choices=("torch", "vllm"))
    parser.add_argument("--shares", type=float, nargs="+", default=[0.3, 0.6, 0.9], help="of what it can do without")
    parser.add_argument("--requests", type=int, default=120, help="in a run")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("bench/results/equal_load.json"))
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="outrider-load-") as name:
        make_pair(Path(name))
        settings = {
            "router.port": 0,
            "target.engine": arguments.engine,
            "target.model": f"{name}/target",
            "target.max_model_len": 1024,
            "target.max_num_seqs": 16,
            "target.enable_prefix_caching": "false",
            "draft.model": f"{name}/draft",
        }
        with LocalCluster(load_config(None, [f"{key}={value}" for key, value in settings.items()])) as cluster:
            cluster.wait_ready(READY_SECONDS)
            document = {"machine": describe_machine(), "engine": arguments.engine, **_measure(cluster.url, arguments)}
    arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(table(document))
    return 0


def _measure(url: str, arguments: argparse.Namespace) -> dict[str, Any]:
    prompts = held_out_prompts(arguments.requests, seed=7)

    def run(way: str, arrivals: Sequence[float] | None, num_streams: int) -> RequestBurst:
        shared = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": arguments.temperature}
        k: int | str = way if way == "auto" else int(way)
        bodies = [
            shared | {"prompt": prompt, "seed": seed, "num_speculative_tokens": k}
            for seed, prompt in enumerate(prompts)
        ]
        return ask_all(url, bodies, num_streams=num_streams, arrivals=arrivals)

    for way in _WAYS:  # warm, and the controller's first trials
        run(way, None, 8)
    capacity = arguments.requests / run("0", None, 16).seconds
    runs: dict[str, dict[str, list[Any]]] = {}
    for share in arguments.shares:
        rng = random.Random(1)
        arrivals, at = [], 0.0
        for _ in prompts:
            at += rng.expovariate(share * capacity)
            arrivals.append(at)
        both: dict[str, list[Any]] = {way: [] for way in _WAYS}
        for _ in range(arguments.repeats):
            for way in _WAYS:
                both[way].append(asdict(_latency(run(way, arrivals, NUM_STREAMS))))
        runs[f"{share:g}"] = both
    return {"requests_per_second": capacity, "runs": runs}


def _latency(burst: RequestBurst) -> Latency:
    first = [answer.first_token_seconds for answer in burst.answers]
    gaps = [gap for answer in burst.answers for gap in answer.token_gaps]
    each = [(a.last_token_seconds - a.first_token_seconds) / (a.num_tokens - 1) for a in burst.answers]
    return Latency(statistics.median(first), p99(first), statistics.median(gaps), p99(gaps), p99(each))


def table(document: dict[str, Any]) -> str:
    lines = [
        f"{document['engine']}: {document['requests_per_second']:.1f} requests/s without speculation",
        "",
        "| load | first token p99, ms | ratio | between tokens p99 | ratio | time per output token p99 | ratio |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for share, both in document["runs"].items():
        cells = [share]
        for key in ("first_token_p99", "gap_p99", "time_per_token_p99"):
            plain, auto = ([run[key] for run in both[way]] for way in _WAYS)
            ratios = [a / p for a, p in zip(auto, plain, strict=True)]
            cells.append(f"{1e3 * statistics.median(plain):.0f} → {1e3 * statistics.median(auto):.0f}")
            of_repeats = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
            cells.append(f"{statistics.median(ratios):.2f}{of_repeats}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
