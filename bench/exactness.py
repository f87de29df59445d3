"""How many tokens differ between ways of making the same answers: `python -m bench.exactness --dtype bfloat16`.

The answers of a cluster without drafts are compared with those under speculation, by another drafter at another k,
with other blocks and chunks of prompts, and one at a time.

`--instruction-sets all`: on each set that this processor's kernels can be forced to, emulated ones too, answers without
drafts are compared with those under speculation, and the counts are written to a file. `portable` runs at every
register width. Environment variables pass the set and the width to the cluster's programs.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import httpx

from bench.result import describe_machine, write_result
from bench.workload import held_out_prompts, read_counters
from cluster.config.file import load_config
from cluster.engine.cpu_kernels import LANES_VARIABLE, VARIABLE, InstructionSet, kernels
from services.launch.local import LocalCluster

READY_TIMEOUT_SECONDS = 120
MAX_TOKENS = 250
TEMPERATURES = (0.0, 0.7, 1.0)
OTHER_CUT = (
    "draft.drafter=ngram",
    "draft.context_tokens=auto",
    "target.block_size=48",
    "target.max_num_batched_tokens=80",
)
OUT = Path("bench/results/exactness.json")

Row = dict[str, object]


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

    with httpx.Client(base_url=url, timeout=3600) as client, ThreadPoolExecutor(concurrency) as threads:
        return list(threads.map(complete, range(len(prompts))))


def num_differing(expected: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Tokens that differ, and answers that have one."""
    by_answer = [
        sum(a != b for a, b in zip(own, other, strict=True)) for own, other in zip(expected, others, strict=True)
    ]
    return sum(by_answer), sum(map(bool, by_answer))


def compare_ways(prompts: Sequence[Sequence[int]], shared: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Compares each way to speculate with no speculation, and prints the numbers of answers and tokens.

    Returns the numbers of differing tokens and answers, by the way's name.
    """
    compared: dict[str, list[list[int]]] = {}
    with LocalCluster(load_config(None, shared)) as cluster:
        cluster.wait_ready(READY_TIMEOUT_SECONDS)
        expected = answers(cluster.url, prompts, k=0, concurrency=8)
        compared["k = 4"] = answers(cluster.url, prompts, k=4, concurrency=8)
        compared["k = 7, one at a time"] = answers(cluster.url, prompts, k=7, concurrency=1)
    with LocalCluster(load_config(None, [*shared, *OTHER_CUT])) as cluster:
        cluster.wait_ready(READY_TIMEOUT_SECONDS)
        compared["n-gram drafter, k = 8, other blocks and chunks"] = answers(cluster.url, prompts, k=8, concurrency=16)
    print(f"{len(prompts)} answers, {sum(map(len, expected))} tokens")
    return {name: num_differing(expected, others) for name, others in compared.items()}


def compare_on(using: InstructionSet, prompts: Sequence[Sequence[int]], shared: Sequence[str]) -> Iterator[Row]:
    """Compares answers with and without speculation on one instruction set. Yields rows for the table."""
    name, expected = using.name.lower(), None
    for lanes in _widths() if using is InstructionSet.PORTABLE else [""]:
        forced = {VARIABLE: name} | ({LANES_VARIABLE: lanes} if lanes else {})
        with patch.dict(os.environ, forced), LocalCluster(load_config(None, shared)) as cluster:
            cluster.wait_ready(READY_TIMEOUT_SECONDS)
            if expected is None:
                expected = answers(cluster.url, prompts, k=0, concurrency=8)
            drafted = answers(cluster.url, prompts, k=4, concurrency=5)
            counters = read_counters(f"{cluster.url}/metrics")
        num_tokens, num_answers = num_differing(expected, drafted)
        yield {
            "instruction_set": f"{name}, {lanes} lanes" if lanes else name,
            "num_answers": len(prompts),
            "num_tokens": sum(map(len, expected)),
            "num_accepted_drafts": int(counters["vllm:spec_decode_num_accepted_tokens_total"]),
            "num_different_tokens": num_tokens,
            "num_different_answers": num_answers,
        }


def _widths() -> list[str]:
    """Returns this processor's widths, in float32 numbers."""
    assert kernels is not None
    found = [str(lanes) for lanes in (16, 8, 4) if kernels.use_lanes(lanes)]
    kernels.use_lanes(0)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.exactness", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--numerics", default="invariant", choices=("fast", "invariant"))
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument(
        "--instruction-sets",
        type=lambda text: text.split(","),
        default=None,
        metavar="all|NAME,...",
        help="compare on each of these; they are of bfloat16",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=OUT,
        help="of --instruction-sets; rows of other sets are kept where machine and numerics are the same",
    )
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    arguments = parser.parse_args()
    prompts = held_out_prompts(-(-arguments.tokens // MAX_TOKENS), seed=1)
    shared = [
        "router.port=0",
        "logging.level=warning",
        f"target.dtype={arguments.dtype}",
        f"target.numerics={arguments.numerics}",
        *arguments.overrides,
    ]
    print(f"{arguments.dtype}, numerics {arguments.numerics}")
    if arguments.instruction_sets is None:
        for name, (num_tokens, num_answers) in compare_ways(prompts, shared).items():
            print(f"{name}: {num_tokens} tokens differ, in {num_answers} answers")
        return
    if arguments.dtype != "bfloat16":
        parser.error("--instruction-sets: a model in float32 always takes portable")
    supported = {choice.name.lower(): choice for choice in InstructionSet if choice.is_supported}
    names = list(supported) if arguments.instruction_sets == ["all"] else arguments.instruction_sets
    if unknown := set(names) - supported.keys():
        parser.error(f"--instruction-sets {','.join(sorted(unknown))}: here are {', '.join(supported)}")
    about = {"machine": describe_machine(), "numerics": arguments.numerics}
    kept = _rows_in(arguments.out, about)
    rows = {name: row for name, row in kept.items() if name.partition(",")[0] not in names}
    for name in names:
        for row in compare_on(supported[name], prompts, shared):
            rows[str(row["instruction_set"])] = row
            numbers = f"{row['num_different_tokens']} of {row['num_tokens']}"
            print(f"{row['instruction_set']}: {numbers} tokens differ", flush=True)
            result = {**about, "rows": list(rows.values())}
            write_result(arguments.out, result)


def _rows_in(path: Path, about: Mapping[str, object]) -> dict[str, Row]:
    """Reads the rows at `path`, by instruction set. Returns none if the file has other settings than `about`."""
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    if any(found[key] != value for key, value in about.items()):
        return {}
    return {row["instruction_set"]: row for row in found["rows"]}


if __name__ == "__main__":
    main()
