"""How many tokens differ between ways of making the same answers: `python -m bench.exactness --dtype bfloat16`.

The answers of a cluster without drafts are compared with those under speculation, by another drafter at another k,
with other blocks and chunks of prompts, and one at a time.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx

from bench.workload import held_out_prompts
from cluster.config_file import load_config
from services.launch.local import LocalCluster

READY_TIMEOUT_SECONDS = 120
MAX_TOKENS = 250
TEMPERATURES = (0.0, 0.7, 1.0)
OTHER_CUT = ("draft.drafter=ngram", "target.block_size=48", "target.max_num_batched_tokens=80")


def answers(url: str, prompts: Sequence[Sequence[int]], k: int, concurrency: int) -> list[list[int]]:
    def complete(index: int) -> list[int]:
        body = {
            "prompt": list(prompts[index]),
            "seed": index,
            "temperature": TEMPERATURES[index % len(TEMPERATURES)],
            "max_tokens": MAX_TOKENS,
            "num_speculative_tokens": k,
            "return_token_ids": True,
            "ignore_eos": True,
        }
        reply = client.post("/v1/completions", json=body)
        reply.raise_for_status()
        token_ids: list[int] = reply.json()["choices"][0]["token_ids"]
        return token_ids

    with httpx.Client(base_url=url, timeout=600) as client, ThreadPoolExecutor(concurrency) as threads:
        return list(threads.map(complete, range(len(prompts))))


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.exactness", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--numerics", default="invariant", choices=("fast", "invariant"))
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    arguments = parser.parse_args()
    prompts = held_out_prompts(-(-arguments.tokens // MAX_TOKENS), seed=1)
    shared = [
        "router.port=0",
        f"target.dtype={arguments.dtype}",
        f"target.numerics={arguments.numerics}",
        *arguments.overrides,
    ]
    compared: dict[str, list[list[int]]] = {}
    with LocalCluster(load_config(None, shared)) as cluster:
        cluster.wait_ready(READY_TIMEOUT_SECONDS)
        expected = answers(cluster.url, prompts, k=0, concurrency=8)
        compared["k = 4"] = answers(cluster.url, prompts, k=4, concurrency=8)
        compared["k = 7, one at a time"] = answers(cluster.url, prompts, k=7, concurrency=1)
    with LocalCluster(load_config(None, [*shared, *OTHER_CUT])) as cluster:
        cluster.wait_ready(READY_TIMEOUT_SECONDS)
        compared["n-gram drafter, k = 8, other blocks and chunks"] = answers(cluster.url, prompts, k=8, concurrency=16)
    num_tokens = sum(map(len, expected))
    print(f"{arguments.dtype}, numerics {arguments.numerics}: {len(prompts)} answers, {num_tokens} tokens")
    for name, others in compared.items():
        differing = [
            sum(a != b for a, b in zip(own, other, strict=True)) for own, other in zip(expected, others, strict=True)
        ]
        print(f"{name}: {sum(differing)} tokens differ, in {sum(map(bool, differing))} answers")


if __name__ == "__main__":
    main()
