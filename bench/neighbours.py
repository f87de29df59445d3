"""Measures what a key's requests cost another key: `python -m bench.neighbours`.

A victim with a key of its own sends one short request after the other. The times to its first token and between later
ones are measured alone, next to an honest neighbour, and next to each attack. A further key always has requests in
flight, the load. An attacker has one request in flight or 32 choices, an honest neighbour 32 requests. The target is
simulated: it has places and steps but computes nothing, so that only waiting shows. The router is real. Neighbours are
processes of their own, so that the victim's clock does not wait for them.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import multiprocessing
import multiprocessing.synchronize
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.result import write_cells
from bench.workload import write_keys
from cluster.config.file import load_config
from services.launch.local import LocalCluster

NUM_CHOICES = 32  # in flight at each neighbour; as many as the target has places
_NUM_TOKENS = 30  # of an answer
_VICTIM = {"prompt": [70] * 100, "max_tokens": _NUM_TOKENS, "stream": True, "ignore_eos": True}
_MEGABYTES = 8 * 2**20 - 2**16
_PRIVATE = "".join(map(chr, (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE))))
SETTINGS = (
    "target.engine=simulated",
    "draft.replicas=0",
    "speculation.num_speculative_tokens=0",
    "target.max_num_seqs=32",
    "simulation.target_step_ms=[[1, 20], [64, 24]]",
    "router.port=0",
)


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Requests that are sent again and again."""

    path: str
    body: bytes
    num_in_flight: int = 1
    coding: str = "identity"
    method: str = "POST"


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def _completion(**fields: Any) -> bytes:
    return _json({"prompt": [71] * 100, "max_tokens": _NUM_TOKENS, "ignore_eos": True} | fields)


def _chat(content: object, **fields: Any) -> bytes:
    return _json({"messages": [{"role": "user", "content": content}], "max_tokens": 2} | fields)


def neighbours() -> dict[str, Neighbour]:
    alternatives = [{"type": "object", "properties": {f"a{i}": {"type": "integer"}}} for i in range(200)]
    history = [{"role": "user", "content": "fox " * 500} for _ in range(3900)]
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"anyOf": alternatives}}}
    words = "".join(f"w{index * 7919 % 9973:x} " for index in range(4000))[:16_000]
    bad_words = [f"{index} {words[5 * index : 5 * index + 50]}" for index in range(256)]
    chat, completions = "/v1/chat/completions", "/v1/completions"
    return {
        "honest": Neighbour(completions, _completion(), NUM_CHOICES),
        "n = 32": Neighbour(completions, _completion(n=NUM_CHOICES)),
        "n = 32, priority -2^31": Neighbour(completions, _completion(n=NUM_CHOICES, priority=-(2**31))),
        "prompts of 2,000 tokens": Neighbour(completions, _completion(prompt=[72] * 2000), NUM_CHOICES),
        "answers of 1,000 tokens": Neighbour(completions, _completion(max_tokens=1000), NUM_CHOICES),
        "a prompt scored": Neighbour(completions, _completion(prompt=[73] * 2000, echo=True, logprobs=5), 4),
        "8 MB of text": Neighbour(chat, _chat("fox " * (_MEGABYTES // 4))),
        "private-use characters": Neighbour(chat, _chat(_PRIVATE * 8 + "<|endoftext|>" + "a" * 4_000_000)),
        "empty gzip members": Neighbour(completions, gzip.compress(b"") * 400_000, coding="gzip"),
        "truncation auto": Neighbour(
            "/v1/responses", _json({"input": history, "truncation": "auto", "max_output_tokens": 2})
        ),
        "a schema of 200 alternatives": Neighbour(chat, _chat("hi", response_format=schema)),
        "16 KB to tokenise": Neighbour("/tokenize", _json({"prompt": words}), NUM_CHOICES),
        "256 bad words": Neighbour(completions, _completion(bad_words=bad_words), NUM_CHOICES),
        "metrics": Neighbour("/metrics", b"", NUM_CHOICES, method="GET"),
    }


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds of the victim's requests."""

    num_requests: int
    first_p50: float
    first_p99: float
    token_p50: float
    token_p99: float


def _times(first: Sequence[float], tokens: Sequence[float]) -> Times:
    def percentile(values: Sequence[float], share: float) -> float:
        return 1e3 * sorted(values)[min(len(values) - 1, int(share * len(values)))]

    return Times(len(first), *(percentile(values, share) for values in (first, tokens) for share in (0.5, 0.99)))


def ask(client: httpx.Client, headers: Mapping[str, str]) -> tuple[float, float]:
    """Returns the seconds to the victim's first token, and the mean seconds of the others."""
    arrived, began_at = [], time.perf_counter()
    with client.stream("POST", "/v1/completions", json=_VICTIM, headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                arrived.append(time.perf_counter())
    return arrived[0] - began_at, (arrived[-1] - arrived[0]) / (_NUM_TOKENS - 1)


@contextlib.contextmanager
def next_to(url: str, neighbour: Neighbour | None, keys: Sequence[str]) -> Iterator[None]:
    """Has `neighbour` send its requests with each of `keys` meanwhile."""
    if neighbour is None:
        yield
        return
    context = multiprocessing.get_context("spawn")
    has_begun, has_ended = context.Event(), context.Event()
    process = context.Process(target=_send_all, args=(url, neighbour, keys, has_begun, has_ended))
    process.start()
    try:
        has_begun.wait()
        yield
    finally:
        has_ended.set()
        process.join()


def _send_all(
    url: str,
    neighbour: Neighbour,
    keys: Sequence[str],
    has_begun: multiprocessing.synchronize.Event,
    has_ended: multiprocessing.synchronize.Event,
) -> None:
    """Sends the requests of `neighbour` with each of `keys` until `has_ended`."""
    os.nice(10)  # real clients do not use the processors of the router

    def send(key: str) -> None:
        headers = {
            "authorization": f"Bearer {key}",
            "content-type": "application/json",
            "content-encoding": neighbour.coding,
        }
        with httpx.Client(base_url=url, timeout=600, trust_env=False) as client:
            while not has_ended.is_set():
                client.request(neighbour.method, neighbour.path, content=neighbour.body, headers=headers)

    threads = [threading.Thread(target=send, args=(key,)) for key in keys for _ in range(neighbour.num_in_flight)]
    for thread in threads:
        thread.start()
    has_begun.set()
    for thread in threads:
        thread.join()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each neighbour; default 20")
    parser.add_argument("--hostile-keys", type=int, default=1, help="keys of the neighbour; default 1")
    parser.add_argument("--load", type=float, default=0.3, help="share of the places that others use; default 0.3")
    parser.add_argument("--only", nargs="+", choices=neighbours(), default=list(neighbours()), metavar="NEIGHBOUR")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    cells: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        names = ["victim", "load", *(f"other{index}" for index in range(arguments.hostile_keys))]
        file, (victim, load_key, *others) = write_keys(Path(folder), names)
        config = load_config(None, [*SETTINGS, f"router.api_keys_file={file}"])
        headers = {"authorization": f"Bearer {victim}"}
        load = Neighbour("/v1/completions", _completion(), round(arguments.load * NUM_CHOICES))
        print("| neighbour | requests | first token, p50 | p99 | further tokens, p50 | p99 |")
        print("| --- | --- | --- | --- | --- | --- |")
        with (
            LocalCluster(config) as cluster,
            httpx.Client(base_url=cluster.url, timeout=600, trust_env=False) as client,
        ):
            cluster.wait_ready(120)
            ask(client, headers)
            chosen = {name: neighbour for name, neighbour in neighbours().items() if name in arguments.only}
            for name, neighbour in {"nobody": None, **chosen}.items():
                with next_to(cluster.url, load, [load_key]), next_to(cluster.url, neighbour, others):
                    time.sleep(1.0)
                    ends_at, answers = time.monotonic() + arguments.seconds, []
                    while time.monotonic() < ends_at:
                        answers.append(ask(client, headers))
                times = _times(*map(list, zip(*answers, strict=True)))
                cells.append(
                    {"neighbour": name, "hostile_keys": arguments.hostile_keys, "load": arguments.load}
                    | {field: getattr(times, field) for field in times.__slots__}
                )
                print(
                    f"| {name} | {times.num_requests} | {times.first_p50:.0f} | {times.first_p99:.0f} "
                    f"| {times.token_p50:.1f} | {times.token_p99:.1f} |",
                    flush=True,
                )
    if arguments.out is not None:
        write_cells(arguments.out, "bench.neighbours", argv, cells)


if __name__ == "__main__":
    main()
