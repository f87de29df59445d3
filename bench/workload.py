"""Workloads of the benches: prompts of held-out text, and streams that generate from them."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from cluster.config import Config
from cluster.model_folder import resolve_model_folder
from cluster.tokenization import Tokenizer
from services.held_out import held_out_texts
from services.prove.client import ask_all

PROMPT_TOKENS = (32, 160)
_CHARACTERS = 12.5  # of a text for each token of its prompt, more than any has
RAMP_TIMEOUT_SECONDS = 120.0


def held_out_prompts(
    count: int, seed: int, *, model: str | None = None, num_tokens: tuple[int, int] = PROMPT_TOKENS
) -> list[list[int]]:
    """Pieces of text the bundled pair was not trained on, as token IDs of `model`; None: of the bundled target.

    `num_tokens`: the least and the most tokens of a prompt.
    """
    rng = random.Random(seed)
    tokenizer = Tokenizer(resolve_model_folder(model or Config().target.model))
    texts = [held_out.text for held_out in held_out_texts()]
    prompts: list[list[int]] = []
    while len(prompts) < count:
        text = rng.choice(texts)
        start = text.find("\n", rng.randrange(len(text))) + 1
        token_ids = tokenizer.encode(text[start : start + int(_CHARACTERS * num_tokens[1])])[: rng.randint(*num_tokens)]
        if len(token_ids) >= num_tokens[0]:
            prompts.append(token_ids)
    return prompts


def p99(values: Sequence[float]) -> float:
    """Returns the 99th percentile of `values`, which must not be empty."""
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens and duration of one burst of requests."""

    num_tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


def run_streams(
    url: str,
    prompts: Sequence[Sequence[int]],
    *,
    num_streams: int,
    temperature: float,
    num_speculative_tokens: int | None,
    max_tokens: int,
) -> Run:
    """Sends every prompt, `num_streams` at a time, and waits for all answers. A prompt's index is its seed."""
    bodies = [
        _body(prompt, seed, temperature, num_speculative_tokens, max_tokens) for seed, prompt in enumerate(prompts)
    ]
    burst = ask_all(url, bodies, num_streams=num_streams, is_streamed=False)
    return Run(sum(answer.num_tokens for answer in burst.answers), burst.seconds)


def write_keys(folder: Path, names: Iterable[str]) -> tuple[Path, list[str]]:
    """Makes a key for each of `names`. Returns the file of all keys for the router, and the keys."""
    keys = {name: f"sk-{name}-0123456789abcdef" for name in names}
    file = folder / "keys"
    file.write_text("".join(f"{name}:{key}\n" for name, key in keys.items()), encoding="utf-8")
    return file, [*keys.values()]


def run_window(
    url: str,
    prompts: Sequence[Sequence[int]],
    *,
    num_streams: int,
    temperature: float,
    num_speculative_tokens: int | None,
    max_tokens: int,
    seconds: float,
) -> Run:
    """Counts the tokens of `seconds` while `num_streams` streams are busy, each with one prompt after another.

    If streams get out of step, the last ones of a burst run alone. Here that does not happen.
    """
    is_over = threading.Event()
    under_way = threading.Semaphore(0)  # counts the streams that have had their first tokens

    def stream(first: int) -> None:
        number, has_begun = first, False
        while not is_over.is_set():
            prompt = prompts[number % len(prompts)]
            body = _body(prompt, number, temperature, num_speculative_tokens, max_tokens)
            with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
                response.raise_for_status()
                for _ in response.iter_lines():
                    if is_over.is_set():
                        return
                    if not has_begun:
                        has_begun = True
                        under_way.release()
            number += num_streams

    def generated() -> tuple[float, float]:
        return read_counters(f"{url}/metrics")["vllm:generation_tokens_total"], time.perf_counter()

    limits = httpx.Limits(max_connections=num_streams)
    with httpx.Client(base_url=url, timeout=600, limits=limits) as client, ThreadPoolExecutor(num_streams) as threads:
        running = [threads.submit(stream, number) for number in range(num_streams)]
        try:
            for _ in running:  # the time until every stream has its first token does not count
                if not under_way.acquire(timeout=RAMP_TIMEOUT_SECONDS):
                    raise TimeoutError("not all streams get tokens")
            before, started_at = generated()
            time.sleep(seconds)
            after, ended_at = generated()
        finally:
            is_over.set()
        for future in running:
            future.result()
    return Run(round(after - before), ended_at - started_at)


def _body(
    prompt: Sequence[int], seed: int, temperature: float, num_speculative_tokens: int | None, max_tokens: int
) -> dict[str, Any]:
    return {
        "prompt": list(prompt),
        "seed": seed,
        "temperature": temperature,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "num_speculative_tokens": "auto" if num_speculative_tokens is None else num_speculative_tokens,
    }


def read_counters(url: str) -> dict[str, float]:
    """Returns sums of a page's metrics by name, and by `name:value` for the labels `kind`, `k` and `position`."""
    counters: dict[str, float] = {}
    for line in httpx.get(url, timeout=10).text.splitlines():
        if line.startswith("#"):
            continue
        name, _, value = line.rpartition(" ")
        name, _, labels = name.partition("{")
        names = [name, *(f"{name}:{kind}" for kind in re.findall(r'\b(?:kind|k|position)="(\w+)"', labels))]
        for name in names:
            counters[name] = counters.get(name, 0.0) + float(value)
    return counters
