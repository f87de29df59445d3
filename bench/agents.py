"""Measures drafts from earlier text on the work of agents: `python -m bench.agents`.

A session reads a file, edits it, reads it again, and so on: each turn's prompt has all turns before it, and the model
answers each turn. Other workloads are tool results in JSON, and a chat without repetition. Files are those of the
standard library. Every session is asked once of each cluster, so that nobody finds an answer of an earlier run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.result import describe_machine, write_result
from bench.speedup import READY_TIMEOUT_SECONDS, cluster_counters
from cluster.config.file import load_config
from cluster.model_folder import resolve_model_folder
from cluster.tokenization import Tokenizer
from services.held_out import held_out_texts
from services.launch.local import LocalCluster
from services.prove.client import ask_all

_SUFFIXES = f"speculation.suffix_bytes={64 << 20}"
_NO_MODEL = ("draft.replicas=0",)
WAYS: dict[str, tuple[str, ...]] = {
    "none": ("speculation.num_speculative_tokens=0", *_NO_MODEL),
    "model": (),
    "ngram": ("draft.drafter=ngram",),
    "earlier text": (_SUFFIXES, *_NO_MODEL),
    "earlier text and model": (_SUFFIXES,),
}
_COUNTED = ("vllm:generation_tokens_total", "vllm:spec_decode_num_accepted_tokens_total")


@dataclass(frozen=True, slots=True)
class Result:
    """Medians over sessions of one way to draft, and the mean tokens that a round of a sequence committed."""

    workload: str
    temperature: float
    way: str
    tokens_per_second: float
    tokens_a_round: float


def edits(rng: random.Random) -> list[str]:
    """Texts of the turns of a session that edits a part of a file."""
    files = sorted((Path(os.__file__).parent).glob("*.py"))
    lines: list[str] = []
    while len(lines) < 40:
        lines = rng.choice(files).read_text(encoding="utf-8", errors="ignore").splitlines()
    start = rng.randrange(len(lines) - 20)
    part = lines[start : start + 12]
    turns = []
    for number in range(20):
        edited = rng.randrange(len(part))
        part[edited] = f"{part[edited]}  # checked {number}"
        shown = "\n".join(part)
        turns.append(f"# Step {number}: the file after the edit of line {edited}\n{shown}\n# The file again:\n")
    return turns


def tool_results(rng: random.Random) -> list[str]:
    """Texts of the turns of a session whose tools answer in JSON."""
    names = [f"service-{rng.randrange(100)}" for _ in range(6)]
    turns = []
    for _ in range(20):
        records = [
            {"name": name, "status": rng.choice(["running", "failed"]), "restarts": rng.randrange(9), "zone": "eu-1"}
            for name in rng.sample(names, 3)
        ]
        turns.append(f"result = {json.dumps(records)}\nresult = ")
    return turns


def prose(rng: random.Random) -> list[str]:
    """Texts of the turns of a session whose turns have nothing in common."""
    texts = [one.text for one in held_out_texts()]
    turns = []
    for _ in range(20):
        text = rng.choice(texts)
        start = rng.randrange(max(1, len(text) - 400))
        turns.append(f"\n{text[start : start + 300]}")
    return turns


WORKLOADS: dict[str, Callable[[random.Random], list[str]]] = {"edits": edits, "JSON": tool_results, "prose": prose}


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _parser().parse_args(argv)
    base = load_config(None, arguments.overrides)
    tokenizer = Tokenizer(resolve_model_folder(base.target.model))
    longest = (base.target.max_model_len or 2048) - arguments.max_tokens - 1
    results: list[Result] = []
    with ExitStack() as running:
        clusters: dict[str, LocalCluster] = {}
        for way in arguments.ways:
            config = load_config(None, ["router.port=0", *arguments.overrides, *WAYS[way]])
            clusters[way] = running.enter_context(LocalCluster(config))
        for cluster in clusters.values():
            cluster.wait_ready(READY_TIMEOUT_SECONDS)
        print("| workload | T | drafts | tokens/s | speedup | tokens a round |\n|---|---|---|---|---|---|")
        for workload in arguments.workloads:
            for temperature in arguments.temperatures:
                found = _measure(clusters, workload, temperature, tokenizer, longest, arguments)
                results += found
                for one in found:
                    speedup = one.tokens_per_second / found[0].tokens_per_second
                    print(
                        f"| {workload} | {temperature:g} | {one.way} | {one.tokens_per_second:.0f} | {speedup:.2f} "
                        f"| {one.tokens_a_round:.2f} |",
                        flush=True,
                    )
    document = {
        "target": base.target.model,
        "machine": describe_machine(),
        "sessions": arguments.sessions,
        "streams": arguments.streams,
        "max_tokens": arguments.max_tokens,
        "results": [asdict(one) for one in results],
    }
    write_result(arguments.out, document)


def _measure(
    clusters: dict[str, LocalCluster],
    workload: str,
    temperature: float,
    tokenizer: Tokenizer,
    longest: int,
    arguments: argparse.Namespace,
) -> list[Result]:
    rates: dict[str, list[float]] = {way: [] for way in clusters}
    grown: dict[str, Counter[str]] = {way: Counter() for way in clusters}
    for number in range(arguments.sessions):
        for way, cluster in clusters.items():
            before = cluster_counters(cluster)
            rates[way].append(_run_sessions(cluster.url, workload, temperature, tokenizer, longest, number, arguments))
            after = cluster_counters(cluster)
            grown[way].update({name: after.get(name, 0.0) - before.get(name, 0.0) for name in _COUNTED})
    results = []
    for way, counted in grown.items():
        generated, accepted = (counted[name] for name in _COUNTED)
        results.append(
            Result(workload, temperature, way, statistics.median(rates[way]), generated / (generated - accepted))
        )
    return results


def _run_sessions(
    url: str,
    workload: str,
    temperature: float,
    tokenizer: Tokenizer,
    longest: int,
    number: int,
    arguments: argparse.Namespace,
) -> float:
    """Runs `arguments.streams` sessions turn by turn. Returns their tokens per second between first and last tokens."""
    seeds = [number * arguments.streams + stream for stream in range(arguments.streams)]
    sessions = [WORKLOADS[workload](random.Random(seed)) for seed in seeds]
    histories: list[list[int]] = [[] for _ in seeds]
    num_tokens, seconds = 0, 0.0
    for turn in range(len(sessions[0])):
        for history, session in zip(histories, sessions, strict=True):
            history += tokenizer.encode(session[turn])
            if len(history) > longest:  # as agents compact theirs: a prefix that slides would be computed in each turn
                del history[: len(history) - longest // 2]
        bodies = [
            {
                "prompt": history,
                "seed": seed,
                "temperature": temperature,
                "max_tokens": arguments.max_tokens,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            for history, seed in zip(histories, seeds, strict=True)
        ]
        for history, answer in zip(histories, ask_all(url, bodies, num_streams=len(bodies)).answers, strict=True):
            history += answer.token_ids
            num_tokens += answer.num_tokens - 1
            seconds += (answer.last_token_seconds - answer.first_token_seconds) / len(bodies)
    return num_tokens / seconds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.agents", description=__doc__)
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS), help=", ".join(WAYS))
    parser.add_argument("--workloads", type=lambda text: text.split(","), default=list(WORKLOADS))
    parser.add_argument("--temperatures", type=lambda text: [float(one) for one in text.split(",")], default=[0.0, 1.0])
    parser.add_argument("--sessions", type=int, default=3, help="of each stream")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--out", type=Path, default=Path("bench/results/agents.json"))
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    return parser


if __name__ == "__main__":
    main()
