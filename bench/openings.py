"""A draft worker that restarts under many long contexts: `python -m bench.openings`.

Simulated engines, and a real router, target and draft worker. Streams of long prompts run; the worker is killed; the
launcher starts it again, and the target opens all that runs there. What is seen at the target's metrics page:

    back      from the worker's end to the first draft that is accepted again
    all back  from there on until every sequence of a step has drafts again
    opened    what was sent for that
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from bench.machine import describe_machine
from bench.workload import read_counters
from cluster.config.file import load_config
from services.launch.local import LocalCluster

_TIMEOUT_SECONDS = 120.0
_POLL_SECONDS = 0.02
_SETTINGS = (
    "router.port=0",
    "target.engine=simulated",
    "draft.drafter=simulated",
    "target.max_model_len=131072",
    "target.max_waiting_tokens=8388608",
    "target.kv_cache_bytes=34359738368",
    "target.enable_prefix_caching=false",
    "target.max_num_batched_tokens=8192",
    "draft.max_num_batched_tokens=8192",
    "simulation.target_step_ms=[[1, 30], [64, 30], [8192, 40]]",
    "simulation.draft_step_ms=[[1, 2], [64, 2], [8192, 20]]",
    "simulation.vocab_size=128000",
    "speculation.num_speculative_tokens=4",
    "router.max_body_bytes=2097152",
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.openings", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--set", action="append", default=[], metavar="a.b=v", help="settings of the cluster")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=100_000)
    parser.add_argument("--out", type=Path, default=Path("bench/results/openings.json"))
    arguments = parser.parse_args(argv)
    config = load_config(None, [*_SETTINGS, *arguments.set])
    with LocalCluster(config) as cluster:
        cluster.wait_ready(120)
        row = measure(cluster, arguments.streams, arguments.prompt_tokens)
    print(json.dumps(row, indent=2))
    arguments.out.write_text(json.dumps({"machine": describe_machine(), **row}, indent=1) + "\n", encoding="utf-8")
    return 0


def measure(cluster: LocalCluster, num_streams: int, num_prompt_tokens: int) -> dict[str, float]:
    """Measures openings with `num_streams` streams, which run until they are cut off."""
    ending = threading.Event()

    def run(number: int) -> None:
        prompt = random.Random(number).choices(range(20_000, 120_000), k=num_prompt_tokens)  # of three bytes each
        body = {"prompt": prompt, "max_tokens": 20_000, "seed": number, "stream": True, "ignore_eos": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            for _ in answer.iter_raw():
                if ending.is_set():
                    return

    page = cluster.targets[0].metrics_url

    def count(name: str) -> float:
        return read_counters(page).get(name, 0.0)

    def num_accepted() -> float:
        return read_counters(f"{cluster.url}/metrics").get("vllm:spec_decode_num_accepted_tokens_total", 0.0)

    def wait(what: str, condition: Callable[[], bool]) -> float:
        """Waits for `condition`. Returns the seconds that it took."""
        started_at = time.monotonic()
        while not condition():
            cluster.watch()
            if time.monotonic() > started_at + _TIMEOUT_SECONDS:
                raise TimeoutError(f"{what}: not after {_TIMEOUT_SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)
        return time.monotonic() - started_at

    def rounds() -> float:
        """Returns the seconds until tokens are committed while no sequence decodes without drafts."""

        def all_drafted() -> bool:
            before = read_counters(page)
            time.sleep(0.2)
            after = read_counters(page)
            names = ("outrider_plain_decodes_total", "outrider_committed_tokens_total", "outrider_steps_total:prefill")
            plain, committed, prompts = (after.get(name, 0.0) - before.get(name, 0.0) for name in names)
            return plain == prompts == 0 and committed > num_streams

        return wait("every sequence has drafts", all_drafted)

    limits = httpx.Limits(max_connections=num_streams)
    with (
        httpx.Client(base_url=cluster.url, timeout=600, limits=limits) as client,
        ThreadPoolExecutor(num_streams) as threads,
    ):
        running = [threads.submit(run, number) for number in range(num_streams)]
        try:
            wait("all streams run", lambda: count("vllm:num_requests_running") == num_streams)
            rounds()
            (draft,) = cluster.drafts
            os.kill(draft.pid, signal.SIGKILL)
            ended_at = time.monotonic()
            up = "outrider_draft_links_up"
            wait("the link is down", lambda: count(up) == 0)
            accepted = num_accepted()
            wait("the link is up", lambda: count(up) == 1)
            up_seconds = time.monotonic() - ended_at
            sent = count("outrider_link_bytes_total")
            wait("a draft is accepted", lambda: num_accepted() > accepted)
            back_seconds = time.monotonic() - ended_at
            rounds()
            all_seconds = time.monotonic() - ended_at
            opened = count("outrider_link_bytes_total") - sent
        finally:
            ending.set()
        for stream in running:
            stream.result()
    return {
        "streams": num_streams,
        "prompt_tokens": num_prompt_tokens,
        "link_up_s": round(up_seconds, 2),
        "back_s": round(back_seconds, 2),
        "all_back_s": round(all_seconds, 2),
        "opened_mb": round(opened / 1e6, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
