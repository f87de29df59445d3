"""Measures the speedup from the demonstration's draft in `make demo`: `python -m bench.demonstration --target DIR`.

One stream of chat questions runs with the controller's k and without drafts in turn. The answers have to be the same.
`--target` is the folder that `python -m bench.instruct --out DIR` writes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.machine import describe_machine
from cluster.config.file import load_config
from services.http_call import call
from services.launch.local import LocalCluster

_DRAFT = "outrider-draft-smollm2-135m"
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Explain how rain forms.",
    "Write a short story about a lighthouse keeper.",
    "What are three benefits of exercise?",
    "How do I make pancakes?",
    "Why is the sky blue?",
    "Describe the water cycle.",
    "What is photosynthesis?",
)
_READY_SECONDS = _ANSWER_SECONDS = 120.0
_MAX_TOKENS = 96


@dataclass(frozen=True, slots=True)
class Compared:
    """At one temperature; tokens a second, by repeat."""

    temperature: float
    without: list[float]
    auto: list[float]
    num_equal: int  # of the answers

    def row(self) -> str:
        ratios = [auto / without for auto, without in zip(self.auto, self.without, strict=True)]
        return (
            f"| {self.temperature:g} | {statistics.median(self.without):.0f} | {statistics.median(self.auto):.0f} "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) "
            f"| {self.num_equal} of {len(QUESTIONS)} |"
        )


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    settings = [f"target.model={arguments.target}", f"draft.model={_DRAFT}", "router.port=0", "logging.level=error"]
    rows: list[Compared] = []
    with LocalCluster(load_config(None, settings)) as cluster:
        cluster.wait_ready(_READY_SECONDS)
        print("| T | without drafts | with | times (range) | answers that are equal |\n| --- | --- | --- | --- | --- |")
        for temperature in arguments.temperatures:
            rows.append(_compare(cluster.url, temperature, arguments.repeats))
            print(rows[-1].row(), flush=True)
    document = {"machine": describe_machine(), "compared": [asdict(row) for row in rows]}
    arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


def _compare(url: str, temperature: float, repeats: int) -> Compared:
    model = call(url, "GET", "/v1/models", None, seconds=_ANSWER_SECONDS)["data"][0]["id"]
    rates: dict[int | str, list[float]] = {0: [], "auto": []}
    texts: dict[int | str, list[str]] = {}
    for _ in range(repeats):
        for depth, of_depth in rates.items():
            started_at = time.perf_counter()
            answers = [_ask(url, model, number, temperature, depth) for number in range(len(QUESTIONS))]
            tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
            of_depth.append(tokens / (time.perf_counter() - started_at))
            texts[depth] = [answer["choices"][0]["message"]["content"] for answer in answers]
    num_equal = sum(one == other for one, other in zip(texts[0], texts["auto"], strict=True))
    return Compared(temperature, rates[0], rates["auto"], num_equal)


def _ask(url: str, model: str, number: int, temperature: float, depth: int | str) -> Any:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTIONS[number]}],
        "max_tokens": _MAX_TOKENS,
        "temperature": temperature,
        "seed": number,
        "num_speculative_tokens": depth,
    }
    return call(url, "POST", "/v1/chat/completions", body, seconds=_ANSWER_SECONDS)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.demonstration", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", type=Path, required=True, help="folder that `bench.instruct` wrote")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("bench/results/demonstration.json"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
