"""Measures what a long prompt costs other requests in its batches: `python -m bench.head_of_line`.

The model has random weights, the bundled target's shape or a wider one, and 32k positions. Streams run all the time.
Short prompts arrive one after the other, first without a long prompt, then while a prompt of 30,000 tokens is computed.
A client measures:

    first     Time to first token of the short prompts.
    between   Time between two chunks of the running streams.
    long      Time to first token of the long prompt, with the streams and short prompts, and alone.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import torch
from safetensors.torch import load_file, save_file

from bench.machine import describe_machine
from bench.models import Widening, widen_model
from cluster.config.file import load_config
from cluster.engine.model_config import ModelConfig
from cluster.model_folder import resolve_model_folder
from services.launch.local import LocalCluster

_POSITIONS = 32_768
_VOCABULARY = range(3, 4000)
_NO_END = {"0": -100}  # the bundled model's end-of-sequence token
_TAIL = 0.99


@dataclass(slots=True)
class Waits:
    """Seconds."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        between = sorted(self.between)
        return {
            "num_short_prompts": len(self.first),
            "first_ms_p50": round(1e3 * statistics.median(self.first), 1),
            "first_ms_max": round(1e3 * max(self.first), 1),
            "between_ms_p50": round(1e3 * statistics.median(between), 1),
            "between_ms_p99": round(1e3 * between[int(_TAIL * (len(between) - 1))], 1),
            "between_ms_max": round(1e3 * between[-1], 1),
        }


class Load:
    """Streams that run until it is left, each begun again when it ends; notes the gaps between their chunks."""

    def __init__(self, client: httpx.Client, num_streams: int) -> None:
        self._client = client
        self._stopping = threading.Event()
        self._gaps: list[tuple[float, float]] = []  # when, and how long
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(num_streams)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def between(self, start: float, end: float) -> list[float]:
        return [gap for at, gap in list(self._gaps) if start <= at <= end]

    def _run(self, number: int) -> None:
        while not self._stopping.is_set():
            last: float | None = None
            for at in chunks(self._client, prompt_of(50, seed=1000 + number), max_tokens=2000):
                if last is not None:
                    self._gaps.append((at, at - last))
                last = at
                if self._stopping.is_set():
                    return


def chunks(client: httpx.Client, prompt: Sequence[int], max_tokens: int) -> Iterator[float]:
    """Yields the time at which each of the answer's chunks came."""
    body = {"prompt": list(prompt), "max_tokens": max_tokens, "stream": True, "seed": 1, "logit_bias": _NO_END}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield time.perf_counter()


def first_token(client: httpx.Client, prompt: Sequence[int]) -> float:
    started_at = time.perf_counter()
    return next(chunks(client, prompt, max_tokens=1)) - started_at


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(_VOCABULARY, k=length)


def make_model(folder: Path, width_factor: int) -> None:
    """The bundled target, so much wider, with random weights and `_POSITIONS` positions."""
    source = resolve_model_folder("outrider-target-12m")
    shape = ModelConfig.from_folder(source)
    widen_model(source, folder, Widening(shape, width_factor, width_factor * shape.intermediate_size))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": _POSITIONS}), encoding="utf-8")
    torch.manual_seed(0)
    tensors = load_file(folder / "model.safetensors")
    weights = {name: torch.randn_like(t) * 0.05 if t.dim() > 1 else t for name, t in tensors.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def measure(client: httpx.Client, *, num_streams: int, long_length: int, num_long: int) -> dict[str, object]:
    alone, behind = Waits(), Waits()
    seeds = iter(range(1, 100_000))
    first_token(client, prompt_of(2000, next(seeds)))  # warm
    long_alone = first_token(client, prompt_of(long_length, next(seeds)))
    with Load(client, num_streams) as load:
        time.sleep(2.0)
        started_at = time.perf_counter()
        for _ in range(20):
            alone.first.append(first_token(client, prompt_of(50, next(seeds))))
            time.sleep(0.2)
        alone.between = load.between(started_at, time.perf_counter())
        beside: list[float] = []
        for number in range(1, num_long + 1):
            computing = threading.Thread(
                target=lambda: beside.append(first_token(client, prompt_of(long_length, next(seeds))))
            )
            started_at = time.perf_counter()
            computing.start()
            time.sleep(0.2)
            while len(beside) < number:
                behind.first.append(first_token(client, prompt_of(50, next(seeds))))
                time.sleep(0.1)
            computing.join()
            behind.between += load.between(started_at, time.perf_counter())
            time.sleep(1.0)
    return {
        "alone": alone.summary(),
        "behind": behind.summary(),
        "long_alone_s": round(long_alone, 2),
        "long_beside_s": round(statistics.median(beside), 2),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.head_of_line", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--set", action="append", default=[], metavar="a.b=v", help="settings of the cluster")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--width-factor", type=int, default=1, help="of the bundled target's width")
    parser.add_argument("--long", type=int, default=30_000, help="tokens of the long prompt")
    parser.add_argument("--repeats", type=int, default=1, help="of the long prompt beside the streams")
    parser.add_argument("--label", default="", help="of this run, in the results")
    parser.add_argument("--out", type=Path, default=Path("bench/results/head-of-line.json"))
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
        make_model(Path(folder), arguments.width_factor)
        settings = [f"target.model={folder}", "target.kv_cache_bytes=2147483648", "draft.kv_cache_bytes=1073741824"]
        config = load_config(None, ["router.port=0", *settings, *arguments.set])
        with LocalCluster(config) as cluster:
            cluster.wait_ready(300)
            with httpx.Client(base_url=cluster.url, timeout=600) as client:
                result = measure(
                    client, num_streams=arguments.streams, long_length=arguments.long, num_long=arguments.repeats
                )
    row = {"label": arguments.label, "width_factor": arguments.width_factor, "settings": arguments.set, **result}
    print(json.dumps(row, indent=2))
    found = json.loads(arguments.out.read_text(encoding="utf-8"))["runs"] if arguments.out.exists() else []
    report = {"machine": describe_machine(), "long_tokens": arguments.long, "runs": [*found, row]}
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
