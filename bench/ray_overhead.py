"""Compares the local launcher with Ray under the same load: `python -m bench.ray_overhead`.

Both clusters are up all the time, with the same settings, and answer in turn; an idle one computes nothing. Under Ray
requests go to the router directly. A third variant sends them through Serve's own proxy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import ray

from bench.faults import SETTINGS
from bench.machine import describe_machine
from bench.workload import held_out_prompts
from cluster.config import Config
from cluster.config.file import load_config
from services.launch.local import LocalCluster, free_ports
from services.launch.ray.launcher import RayApplication
from services.prove.client import RequestBurst, answer_all

READY_SECONDS = 120.0
LOCAL, DIRECT, PROXY = "local launcher", "Ray, router called directly", "Ray, through Serve's proxy"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.ray_overhead", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", choices=tuple(SETTINGS), default="torch")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--requests", type=int, default=32, help="in a run; half as many for one stream")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("bench/results/ray_overhead.json"))
    arguments = parser.parse_args(argv)
    (proxy_port,) = free_ports(1)
    settings = [*SETTINGS[arguments.engine], "router.port=0", f"ray.proxy_port={proxy_port}"]
    cpus = sorted(os.sched_getaffinity(0))
    if arguments.engine != "simulated" and len(cpus) > 1:  # the same cores: only the local launcher divides them itself
        settings += [f"target.cpus=[{cpus[0]}]", f"draft.cpus=[{cpus[1]}]"]
    config = load_config(None, settings)
    ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level="WARNING", log_to_driver=False)
    application = RayApplication(config)
    try:
        with LocalCluster(config) as local:
            local.wait_ready(READY_SECONDS)
            ways = {LOCAL: local.url, DIRECT: _start(application), PROXY: f"http://127.0.0.1:{proxy_port}"}
            document = _measure(ways, config, arguments)
    finally:
        application.stop()
        ray.shutdown()
    arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(table(document))
    return 0


def _start(application: RayApplication) -> str:
    """The router's URL, when all is there."""
    application.start()
    deadline = time.monotonic() + READY_SECONDS
    while not (application.is_running() and application.is_joined()):
        if time.monotonic() > deadline:
            raise SystemExit("the application under Ray is not ready")
        time.sleep(0.2)
    return application.urls()[0]


def _measure(ways: dict[str, str], config: Config, arguments: argparse.Namespace) -> dict[str, Any]:
    prompts = held_out_prompts(arguments.requests, seed=3)
    runs: dict[str, dict[str, list[dict[str, float]]]] = {}
    for num_streams in arguments.streams:
        asked = prompts if num_streams > 1 else prompts[: len(prompts) // 2]
        points = runs[str(num_streams)] = {way: [] for way in ways}
        # What goes through the proxy, which takes cores from the engines, comes after: controllers remember steps.
        for turn in ((LOCAL, DIRECT), (PROXY,)):
            for repeat in range(arguments.repeats + 1):
                for way in turn:
                    model = httpx.get(f"{ways[way]}/v1/models").json()["data"][0]["id"]
                    burst = answer_all(
                        ways[way],
                        model,
                        asked,
                        num_streams=num_streams,
                        temperature=0.7,
                        max_tokens=arguments.max_tokens,
                    )
                    if repeat:  # the first warms, and the controllers learn
                        points[way].append(_result(burst))
    return {"machine": describe_machine(), "engine": arguments.engine, "runs": runs}


def _result(burst: RequestBurst) -> dict[str, float]:
    first = statistics.median(answer.first_token_seconds for answer in burst.answers)
    return {"tokens_per_second": burst.tokens_per_second, "first_token_seconds": first}


def table(document: dict[str, Any]) -> str:
    lines = [
        f"{document['engine']} engines",
        "",
        "| streams | way | tokens/s | of the local launcher's | first token, ms | added, ms |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for num_streams, points in document["runs"].items():
        for way, results in points.items():
            rates, firsts = ([run[key] for run in results] for key in ("tokens_per_second", "first_token_seconds"))
            ratios = [rate / local["tokens_per_second"] for rate, local in zip(rates, points[LOCAL], strict=True)]
            added = [
                1e3 * (first - local["first_token_seconds"]) for first, local in zip(firsts, points[LOCAL], strict=True)
            ]
            ratio = f"{statistics.median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})"
            cells = [num_streams, way, f"{statistics.median(rates):.0f}", "" if way == LOCAL else ratio]
            cells += [
                f"{1e3 * statistics.median(firsts):.1f}",
                "" if way == LOCAL else f"{statistics.median(added):+.1f}",
            ]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
