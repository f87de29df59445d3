"""Measures the cost of grammar masks and log-probabilities in a step: `python -m bench.constraints`.

One cluster runs the same streams in interleaved repeats: plain; with a grammar that allows every text, so that only the
masks are added and tokens stay the same; with 5 log-probabilities; and with a JSON schema, which changes the text. Time
is that of the target's own steps, from its metrics page.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from bench.machine import describe_machine
from bench.workload import held_out_prompts, read_counters
from cluster.config.file import load_config
from services.launch.local import LocalCluster

_SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"enum": ["a", "bb", "ccc"]}},
        "required": ["name", "age", "tags"],
    },
    "minItems": 64,
}
WORKLOADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a grammar of every text": {"guided_regex": r"[\s\S]*"},
    "5 log-probabilities": {"logprobs": 5},
    "a JSON schema": {"guided_json": _SCHEMA},
}
_NO_END = {"0": -100}  # the bundled model's end-of-sequence token


def measure(
    cluster: LocalCluster, prompts: Sequence[Sequence[int]], max_tokens: int, fields: dict[str, Any]
) -> tuple[float, float, list[list[int]]]:
    """Milliseconds of a step, tokens a step, and the answers."""
    metrics_url = cluster.targets[0].metrics_url
    before = read_counters(metrics_url)

    def ask(number: int) -> list[int]:
        body = {"prompt": prompts[number], "max_tokens": max_tokens, "seed": number, "logit_bias": _NO_END, **fields}
        response = client.post("/v1/completions", json={**body, "return_token_ids": True})
        response.raise_for_status()
        token_ids: list[int] = response.json()["choices"][0]["token_ids"]
        return token_ids

    with httpx.Client(base_url=cluster.url, timeout=600) as client, ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(ask, range(len(prompts))))
    after = read_counters(metrics_url)

    def gained(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    steps = gained("outrider_steps_total")
    return 1e3 * gained("outrider_step_seconds_total") / steps, sum(map(len, answers)) / steps, answers


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.constraints", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--set", action="append", default=[], metavar="a.b=v", help="settings of the cluster")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("bench/results/constraints.json"))
    arguments = parser.parse_args(argv)
    prompts = held_out_prompts(arguments.streams, seed=5)
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in WORKLOADS}
    with LocalCluster(load_config(None, ["router.port=0", *arguments.set])) as cluster:
        cluster.wait_ready(300)
        for repeat in range(arguments.repeats + 1):
            answers = {}
            for name, fields in WORKLOADS.items():
                milliseconds, tokens, answers[name] = measure(cluster, prompts, arguments.max_tokens, fields)
                if repeat:  # the first compiles grammars and fills caches
                    seen[name].append((milliseconds, tokens))
            plain = answers["plain"]
            num_different = sum(other != plain[i] for i, other in enumerate(answers["a grammar of every text"]))
            print(f"repeat {repeat}: {num_different} of {len(plain)} answers differ under a grammar of every text")
    rows = []
    for name, points in seen.items():
        ratios = [point[0] / plain[0] for point, plain in zip(points, seen["plain"], strict=True)]
        row = {
            "workload": name,
            "step_ms": round(statistics.median(point[0] for point in points), 3),
            "tokens_per_step": round(statistics.median(point[1] for point in points), 2),
            "step_ratio": round(statistics.median(ratios), 3),
            "step_ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        }
        rows.append(row)
        print(json.dumps(row))
    found = {"machine": describe_machine(), "settings": arguments.set, "streams": arguments.streams, "rows": rows}
    arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
