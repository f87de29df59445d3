"""Routing by prefix on the bundled pair, with and without drafts: `python -m bench.affinity_pair`.

Runs two targets and a draft worker on this machine, and a few conversations of four turns at a time. A conversation
begins with 300 to 400 tokens of held-out text. Answers have 32 tokens, and each further turn adds 16 to 32 tokens. Each
pass sends the same conversations to the same cluster, with routing by prefix or by load, and with or without drafts.
A separate cache salt makes each pass start with empty caches. Reports, for turns after the first, the time to first
token and the cached tokens relative to an endless cache. All passes must give the same answers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.cells import write_cells
from bench.workload import held_out_prompts, p99
from cluster.config.file import load_config
from services.launch.local import LocalCluster, free_ports

_NUM_TURNS = 4
_ANSWER_TOKENS = 32
_OPENING_TOKENS = (300, 400)
_MESSAGE_TOKENS = (16, 32)
_BLOCK_TOKENS = 16
ROUTINGS = ("affinity", "least-loaded")


@dataclass(frozen=True, slots=True)
class Answer:
    """One turn's answer."""

    token_ids: tuple[int, ...]
    first_token_seconds: float
    num_cached_tokens: int
    num_earlier_tokens: int  # tokens in whole blocks that an endless cache would have from earlier turns


@dataclass(frozen=True, slots=True)
class Cell:
    """One pass."""

    routing: str
    has_drafts: bool
    repeat: int
    first_token_p50: float  # seconds, of turns after the first
    first_token_p99: float
    hits: float  # cached tokens / cached tokens with an endless cache
    num_tokens: int  # of all answers
    num_different: int  # tokens that differ from the first pass


def conversations(number: int) -> list[list[list[int]]]:
    """Returns what the client sends in each turn of each conversation, as token IDs."""
    rng = random.Random(number)
    text = [*itertools.chain.from_iterable(held_out_prompts(20 * number, seed=number))]
    place = 0

    def take(limits: tuple[int, int]) -> list[int]:
        nonlocal place
        size = rng.randint(*limits)
        place += size
        return text[place - size : place]

    return [[take(_OPENING_TOKENS), *(take(_MESSAGE_TOKENS) for _ in range(_NUM_TURNS - 1))] for _ in range(number)]


def talk(
    client: httpx.Client, number: int, messages: Sequence[Sequence[int]], fields: Mapping[str, Any]
) -> list[Answer]:
    """Has one conversation. Returns the answer to each turn."""
    answers: list[Answer] = []
    context: list[int] = []
    for turn, message in enumerate(messages):
        num_earlier = max(len(context) - 1, 0) // _BLOCK_TOKENS * _BLOCK_TOKENS
        context += message
        body = {
            "prompt": context,
            "max_tokens": _ANSWER_TOKENS,
            "seed": 100 * number + turn,
            "temperature": float(number % 2),
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "prompt_cache_key": f"conversation {number}",
            **fields,
        }
        token_ids: list[int] = []
        sent_at, first_token_at, num_cached = time.perf_counter(), 0.0, 0
        with client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                for choice in event["choices"]:
                    first_token_at = first_token_at or time.perf_counter()
                    token_ids += choice["token_ids"]
                if event.get("usage"):
                    num_cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
        answers.append(Answer(tuple(token_ids), first_token_at - sent_at, num_cached, num_earlier))
        context += token_ids
    return answers


def run_pass(
    url: str, talks: Sequence[Sequence[Sequence[int]]], streams: int, fields: Mapping[str, Any]
) -> list[Answer]:
    """Has all conversations, `streams` at a time. Returns their answers in order."""
    with httpx.Client(base_url=url, timeout=600) as client, ThreadPoolExecutor(streams) as threads:
        answers = threads.map(lambda item: talk(client, item[0], item[1], fields), enumerate(talks))
        return [*itertools.chain.from_iterable(answers)]


def cell_of(routing: str, has_drafts: bool, repeat: int, answers: Sequence[Answer], like: Sequence[Answer]) -> Cell:
    later = [answer for answer in answers if answer.num_earlier_tokens]
    waits = [answer.first_token_seconds for answer in later]
    pairs = [
        pair
        for own, other in zip(answers, like, strict=True)
        for pair in zip(own.token_ids, other.token_ids, strict=True)
    ]
    return Cell(
        routing,
        has_drafts,
        repeat,
        first_token_p50=statistics.median(waits),
        first_token_p99=p99(waits),
        hits=sum(answer.num_cached_tokens for answer in later) / sum(answer.num_earlier_tokens for answer in later),
        num_tokens=len(pairs),
        num_different=sum(own != other for own, other in pairs),
    )


def _rows(cells: Sequence[Cell]) -> list[str]:
    rows = []
    for routing, has_drafts in itertools.product(ROUTINGS, (False, True)):
        of_arm = [cell for cell in cells if (cell.routing, cell.has_drafts) == (routing, has_drafts)]
        middle = {
            name: statistics.median(getattr(cell, name) for cell in of_arm)
            for name in ("first_token_p50", "first_token_p99", "hits")
        }
        rows.append(
            f"| {routing} | {'yes' if has_drafts else 'no'} | {1e3 * middle['first_token_p50']:.0f} "
            f"| {1e3 * middle['first_token_p99']:.0f} | {middle['hits']:.2f} "
            f"| {sum(cell.num_different for cell in of_arm)} of {sum(cell.num_tokens for cell in of_arm)} |"
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.affinity_pair", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--streams", type=int, default=4, help="number of concurrent conversations")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("bench/results/affinity-pair.json"))
    arguments = parser.parse_args(argv)
    (admin_port,) = free_ports(1)
    config = load_config(
        None, ["target.replicas=2", "logging.level=warning", f"router.admin_listen=127.0.0.1:{admin_port}"]
    )
    talks, cells, like = conversations(arguments.conversations), list[Cell](), list[Answer]()
    with LocalCluster(config) as cluster:
        cluster.wait_ready()
        run_pass(cluster.url, talks[:4], arguments.streams, {"cache_salt": "warm-up"})
        for repeat, has_drafts, routing in itertools.product(range(arguments.repeats), (False, True), ROUTINGS):
            httpx.put(f"http://127.0.0.1:{admin_port}/admin/routing", json={"routing": routing}).raise_for_status()
            fields: dict[str, Any] = {"cache_salt": f"{routing} {has_drafts} {repeat}"}
            fields |= {} if has_drafts else {"num_speculative_tokens": 0}
            answers = run_pass(cluster.url, talks, arguments.streams, fields)
            like = like or answers
            cells.append(cell_of(routing, has_drafts, repeat, answers, like))
    print("| routing | drafts | first token p50 ms | p99 ms | hits | tokens that differ |\n" + f"|{' --- |' * 6}")
    print("\n".join(_rows(cells)))
    write_cells(arguments.out, "bench.affinity_pair", argv, [asdict(cell) for cell in cells])
    return int(any(cell.num_different for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
