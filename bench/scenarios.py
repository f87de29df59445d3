"""Kinds of work, with speculation and without: `python -m bench.scenarios --instruct DIR --pair DIR`.

The instruct model of `bench.instruct` (n-gram, and the model's own weights in 4 bits) and the 190M pair of
`bench.models`. Each kind of work is answered by one cluster without drafts (k = 0) and with what the controller
chooses, in turn, several times. What repeats itself gains most, and short answers and large batches least.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.machine import describe_machine
from bench.workload import held_out_prompts, p99, read_counters
from cluster.config.file import load_config
from services.launch.local import LocalCluster
from services.prove.client import RequestBurst, ask_all

READY_SECONDS = 300.0

_TOPICS = ("the tides", "a small harbour town", "how bread rises", "the first snow", "an old clock", "a lost letter")
_TEXT = (
    "The committee met on Tuesday at nine. It agreed to buy two ladders, to paint the hall in white and to ask Mr Holm "
    "for the key of the cellar. The next meeting is on the fourth of May at nine. Members who cannot come send word."
)
_CODE = "def area(shape):\n    if shape.kind == 'circle':\n        return 3.14159 * shape.radius ** 2\n"


@dataclass(frozen=True, slots=True)
class Work:
    """Requests of one kind."""

    path: str
    bodies: Sequence[dict[str, Any]]
    num_streams: int


def chat(messages: Sequence[str], max_tokens: int, num_streams: int, *, ends: bool = False) -> Work:
    """Each of `messages` is a user's turn. `ends`: an answer may be shorter."""
    bodies = [
        {
            "messages": [{"role": "user", "content": message}],
            "max_tokens": max_tokens,
            "ignore_eos": not ends,
            "temperature": 0.7,
            "seed": seed,
        }
        for seed, message in enumerate(messages)
    ]
    return Work("/v1/chat/completions", bodies, num_streams)


def completions(prompts: Sequence[Sequence[int]], max_tokens: int, num_streams: int) -> Work:
    bodies = [
        {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.7, "seed": seed}
        for seed, prompt in enumerate(prompts)
    ]
    return Work("/v1/completions", bodies, num_streams)


def instruct_work() -> dict[str, Work]:
    return {
        "chat turns, 4 at once": chat([f"Tell me something about {topic}." for topic in _TOPICS], 96, 4),
        "code": chat(
            [f"Continue this Python code and add a case for {x}:\n{_CODE}" for x in ("squares", "rings")], 96, 1
        ),
        "copying": chat([f"Repeat this text word for word: {_TEXT}", f"Copy the following exactly:\n{_TEXT}"], 64, 1),
        "translation-like": chat([f"Rewrite this text in capital letters: {_TEXT}"] * 2, 64, 1),
        "a long story": chat(["Write a long story about a harbour town."], 400, 1),
        "answers under 20 tokens": chat([f"Name one thing about {topic}." for topic in _TOPICS], 16, 1),
        "batch of 32": chat([f"Tell me about {topic}." for topic in _TOPICS] * 6, 32, 32),
    }


def pair_work() -> dict[str, Work]:
    copied = [(prompt * 3)[:300] for prompt in held_out_prompts(4, seed=11)]
    return {
        "code, 1 at once": completions(held_out_prompts(4, seed=1), 96, 1),
        "code, 4 at once": completions(held_out_prompts(8, seed=2), 96, 4),
        "copying": completions(copied, 96, 1),
        "long": completions(held_out_prompts(1, seed=3), 600, 1),
        "answers under 20 tokens": completions(held_out_prompts(8, seed=4), 16, 1),
        "batch of 32": completions(held_out_prompts(64, seed=5), 48, 32),
        "batch of 64": completions(held_out_prompts(128, seed=6), 32, 64),
    }


@dataclass(frozen=True, slots=True)
class Result:
    tokens_per_second: float
    first_token_seconds: float  # median
    gap_p99_seconds: float
    acceptance_rate: float | None


def measure(cluster: LocalCluster, work: Work, k: int | str) -> Result:
    before = read_counters(f"{cluster.url}/metrics")
    burst = ask_all(
        cluster.url,
        [body | {"num_speculative_tokens": k} for body in work.bodies],
        num_streams=work.num_streams,
        path=work.path,
    )
    after = read_counters(f"{cluster.url}/metrics")
    drafted, accepted = (
        after.get(name, 0.0) - before.get(name, 0.0)
        for name in ("vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total")
    )
    return _result(burst, accepted / drafted if drafted else None)


def _result(burst: RequestBurst, acceptance_rate: float | None) -> Result:
    gaps = [gap for answer in burst.answers for gap in answer.token_gaps]
    first = statistics.median(answer.first_token_seconds for answer in burst.answers)
    return Result(burst.tokens_per_second, first, p99(gaps) if gaps else 0.0, acceptance_rate)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.scenarios", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--instruct", type=Path, help="folder of bench.instruct")
    parser.add_argument("--pair", type=Path, help="folder of bench.models")
    parser.add_argument("--engine", default="torch", choices=("torch", "vllm"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("bench/results/scenarios.json"))
    arguments = parser.parse_args(argv)
    shared = ["router.port=0", f"target.engine={arguments.engine}", "target.enable_prefix_caching=false"]
    setups: dict[str, tuple[list[str], Callable[[], dict[str, Work]]]] = {}
    if arguments.instruct:
        for drafter in ("ngram", "self-int4"):
            model = [f"target.model={arguments.instruct}", f"draft.drafter={drafter}", "target.max_model_len=2048"]
            setups[f"instruct, {drafter}"] = (model, instruct_work)
    if arguments.pair:
        model = [f"target.model={arguments.pair}/target", f"draft.model={arguments.pair}/draft"]
        setups["190M pair"] = (model, pair_work)
    document: dict[str, Any] = {"machine": describe_machine(), "engine": arguments.engine, "setups": {}}
    for name, (settings, work_of) in setups.items():
        with LocalCluster(load_config(None, [*shared, *settings])) as cluster:
            cluster.wait_ready(READY_SECONDS)
            document["setups"][name] = _measure_all(cluster, work_of(), arguments.repeats)
        print(table(name, document["setups"][name]), flush=True)
        arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


def _measure_all(cluster: LocalCluster, works: dict[str, Work], repeats: int) -> dict[str, dict[str, list[Any]]]:
    measured: dict[str, dict[str, list[Any]]] = {kind: {"0": [], "auto": []} for kind in works}
    for repeat in range(repeats + 1):  # the first is to warm
        for kind, work in works.items():
            for k in (0, "auto"):
                result = measure(cluster, work, k)
                if repeat:
                    measured[kind][str(k)].append(asdict(result))
    return measured


def table(setup: str, measured: dict[str, dict[str, list[Any]]]) -> str:
    lines = [
        f"| {setup} | tokens/s, k = 0 | auto | ratio | first token, ms | p99 between tokens, ms | accepted |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for kind, both in measured.items():
        plain, auto = both["0"], both["auto"]

        def median(results: list[Any], key: str) -> float:
            return statistics.median(result[key] for result in results)

        ratios = [a["tokens_per_second"] / p["tokens_per_second"] for a, p in zip(auto, plain, strict=True)]
        rates = [result["acceptance_rate"] for result in auto if result["acceptance_rate"] is not None]
        cells = [
            kind,
            f"{median(plain, 'tokens_per_second'):.0f}",
            f"{median(auto, 'tokens_per_second'):.0f}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            " → ".join(f"{1e3 * median(results, 'first_token_seconds'):.0f}" for results in (plain, auto)),
            " → ".join(f"{1e3 * median(results, 'gap_p99_seconds'):.0f}" for results in (plain, auto)),
            f"{statistics.median(rates):.2f}" if rates else "k = 0",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
