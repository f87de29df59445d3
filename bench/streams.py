"""Many streams at once through one router process: `python -m bench.streams`.

Simulated targets publish a token of every sequence ten times a second, and note when. A client reads all streams over
HTTP/1.1 and notes when each chunk comes; it looks at the contents only after the run. From the two follow

    lost       streams whose tokens are not all those that the target chose, or that do not end as they should
    late       from a token's publication by the target to its arrival at the client; the whole way: the target's
               server, the router, and the client's own queue. A router that falls behind puts the tokens of several
               steps into one chunk
    first      what the way adds to the time to first token: from the request's departure to its arrival at the
               target, and from the first token's publication to its arrival
    CPU        of the router process, for each chunk, while all streams run

A target publishes all its chunks in one instant, so that even without a queue elsewhere the last waits for all others.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import uvloop
import yaml

from bench.result import describe_machine, write_result
from bench.workload import write_keys
from cluster.config import Config
from cluster.config.file import load_config
from cluster.engine.model_config import ModelConfig
from cluster.model_folder import resolve_model_folder
from cluster.simulated_engines.tokens import token_at
from cluster.speculation.noise import NoiseKey
from services.launch.child import Child, end_all
from services.launch.local import free_ports

CHUNKS_PER_SECOND = 10
PROMPT = list(range(100, 116))
READY_TIMEOUT_SECONDS = 60.0
END_TIMEOUT_SECONDS = 60.0  # of the last stream, after the first
RAMP_STREAMS_PER_SECOND = 250
_STEP_MS = 1000 / CHUNKS_PER_SECOND
SETTINGS = (
    "target.engine=simulated",
    "draft.drafter=simulated",
    "speculation.num_speculative_tokens=0",
    f"simulation.target_step_ms=[[1, {_STEP_MS}], [4096, {_STEP_MS}]]",
    "target.max_num_seqs=1024",
    "target.max_num_batched_tokens=4096",
    "target.kv_cache_bytes=17179869184",  # of blocks that are counted and never filled
    "target.enable_prefix_caching=false",
)


class Stream(asyncio.Protocol):
    """One request; notes what comes and when."""

    def __init__(self, seed: int, num_tokens: int, key: str) -> None:
        self.seed = seed
        self.key = key
        self.num_tokens = num_tokens
        self.sent_at = 0.0
        self.received: list[tuple[float, bytes]] = []
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        fields = {"prompt": PROMPT, "max_tokens": self.num_tokens, "seed": self.seed, "stream": True}
        body = json.dumps(fields | {"return_token_ids": True, "ignore_eos": True}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            f"authorization: Bearer {self.key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self.sent_at = time.perf_counter()
        cast(asyncio.Transport, transport).write(head.encode() + body)

    def data_received(self, data: bytes) -> None:
        self.received.append((time.perf_counter(), data))

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set_result(None)

    def events(self) -> Iterator[tuple[float, bytes]]:
        """The server-sent events and when their last byte came."""
        rest = b""
        for at, data in self.received:
            *complete, rest = (rest + data).split(b"\n\n")
            for event in complete:
                yield at, event.partition(b"data: ")[2]

    def is_whole(self, vocab_size: int, events: Sequence[dict[str, Any]]) -> bool:
        """Returns whether the events have all tokens that the target chose, and the last ends with "length"."""
        key = NoiseKey.derive(self.seed, 0)
        expected = [token_at(key, len(PROMPT) + place, vocab_size) for place in range(self.num_tokens)]
        token_ids = [token for event in events for token in event["choices"][0]["token_ids"]]
        return token_ids == expected and events[-1]["choices"][0]["finish_reason"] == "length"


class Viewer(asyncio.Protocol):
    """Client that watches the router's page while the router runs."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(b"GET /page/events HTTP/1.1\r\nhost: localhost\r\n\r\n")


@dataclass(slots=True)
class Result:
    """One number of streams. Times are in milliseconds."""

    num_streams: int
    num_lost: int = 0
    window_seconds: float = 0.0  # in which all streams ran; the rest is of that time
    num_chunks: int = 0
    chunks_per_second: float = 0.0
    tokens_per_second: float = 0.0
    cpu_us_per_chunk: float = 0.0
    cores: dict[str, float] = field(default_factory=dict)  # in use, by process
    late_ms: dict[str, float] = field(default_factory=dict)  # percentiles
    first_ms: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        cores = self.cores
        return (
            f"| {self.num_streams} | {self.num_lost} | {self.tokens_per_second:.0f} | {self.chunks_per_second:.0f} "
            f"| {self.cpu_us_per_chunk:.0f} "
            f"| {cores['router']:.2f} / {cores['targets']:.2f} / {cores['client']:.2f} "
            f"| {self.late_ms['p50']:.1f} / {self.late_ms['p99']:.1f} / {self.late_ms['max']:.1f} "
            f"| {self.first_ms['p50']:.1f} / {self.first_ms['p99']:.1f} |"
        )


class Cluster:
    """A router and its simulated targets; runs while entered."""

    def __init__(self, config: Config, num_keys: int = 0) -> None:
        """`num_keys`: API keys that streams have to use in turn."""
        self._folder = tempfile.TemporaryDirectory(prefix="outrider-")
        folder = Path(self._folder.name)
        keys_file, keys = write_keys(folder, [f"owner{number}" for number in range(num_keys)])
        self._keys = keys or ["none"]
        port, *target_ports = free_ports(1 + config.target.replicas)
        addresses = tuple(f"127.0.0.1:{port}" for port in target_ports)
        self.port = port
        self.config = config.model_copy(
            update={
                "target": config.target.model_copy(update={"addresses": addresses}),
                "router": config.router.model_copy(
                    update={"host": "127.0.0.1", "port": port, "api_keys_file": str(keys_file) if num_keys else None}
                ),
            }
        )
        file = folder / "cluster.yaml"
        file.write_text(yaml.safe_dump(self.config.model_dump(mode="json")), encoding="utf-8")
        self._stamp_files = [folder / f"stamps-{index}.json" for index in range(len(addresses))]
        self.targets = [
            Child("target", ["--config", str(file), "--address", address, "--out", str(out)], "bench.stamped_target")
            for address, out in zip(addresses, self._stamp_files, strict=True)
        ]
        self.router = Child("router", ["router", "--config", str(file)])

    def start(self) -> None:
        """Returns when every target can be used."""
        for child in (*self.targets, self.router):
            child.start()
        deadline = time.monotonic() + READY_TIMEOUT_SECONDS
        while not self._is_ready():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not ready after {READY_TIMEOUT_SECONDS:.0f} s")
            time.sleep(0.1)

    def key_of(self, stream: int) -> str:
        return self._keys[stream % len(self._keys)]

    def _is_ready(self) -> bool:
        headers = {"authorization": f"Bearer {self.key_of(0)}"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/health", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=5) as response:
                targets = json.load(response)["targets"]
        except (urllib.error.URLError, OSError):
            return False
        return all(target["problem"] is None for target in targets)

    def stop(self) -> dict[str, list[float]]:
        """Stops the cluster. Returns when each request came to its target and when its chunks were published."""
        end_all((self.router, *self.targets), END_TIMEOUT_SECONDS)
        stamps: dict[str, list[float]] = {}
        for file in self._stamp_files:
            stamps |= json.loads(file.read_text(encoding="utf-8"))
        self._folder.cleanup()
        return stamps

    def cpu_seconds(self) -> dict[str, float]:
        return {
            "router": _cpu_seconds(self.router.pid),
            "targets": sum(_cpu_seconds(target.pid) for target in self.targets),
            "client": _cpu_seconds(os.getpid()),
        }


def main() -> None:
    arguments = _parser().parse_args()
    config = load_config(None, [*SETTINGS, f"target.replicas={arguments.targets}", *arguments.overrides])
    print(
        f"{arguments.targets} simulated targets, {CHUNKS_PER_SECOND} chunks a second of each stream\n\n"
        "| streams | lost | tokens/s | chunks/s | router CPU µs/chunk | cores: router / targets / client "
        "| late ms: median / p99 / max | first token, added ms: median / p99 |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- |"
    )
    results = []
    for num_streams in arguments.streams:
        results.append(measure(config, num_streams, arguments.seconds, arguments.viewers, arguments.keys))
        print(results[-1], flush=True)
    document = {
        "targets": arguments.targets,
        "viewers": arguments.viewers,
        "keys": arguments.keys,
        "chunks_per_second_of_a_stream": CHUNKS_PER_SECOND,
        "machine": describe_machine(),
        "results": [asdict(result) for result in results],
    }
    write_result(arguments.out, document)


def measure(config: Config, num_streams: int, seconds: float, num_viewers: int = 0, num_keys: int = 0) -> Result:
    cluster = Cluster(config, num_keys)
    try:
        cluster.start()
        gc.disable()  # what is received is kept, and searching it in vain would take ever longer
        ramp_seconds = num_streams / RAMP_STREAMS_PER_SECOND
        num_tokens = round((seconds + ramp_seconds) * CHUNKS_PER_SECOND)
        streams, start, end, cpu = uvloop.run(_run(cluster, num_streams, num_tokens, num_viewers))
    finally:
        gc.enable()
        stamps = cluster.stop()
    vocab_size = ModelConfig.from_folder(resolve_model_folder(config.target.model)).vocab_size
    result = Result(num_streams, window_seconds=end - start)
    late, first = _evaluate(result, streams, stamps, vocab_size, start, end)
    result.chunks_per_second = result.num_chunks / (end - start)
    result.tokens_per_second = len(late) / (end - start)
    result.cpu_us_per_chunk = 1e6 * cpu["router"] / max(result.num_chunks, 1)
    result.cores = {name: used / (end - start) for name, used in cpu.items()}
    result.late_ms, result.first_ms = _percentiles(late), _percentiles(first)
    return result


async def _run(
    cluster: Cluster, num_streams: int, num_tokens: int, num_viewers: int
) -> tuple[list[Stream], float, float, dict[str, float]]:
    """The streams, the time in which all of them ran, and the CPU seconds that each process used in it."""
    loop = asyncio.get_running_loop()
    for _ in range(num_viewers):
        await loop.create_connection(Viewer, "127.0.0.1", cluster.port)
    streams: list[Stream] = []
    for seed in range(num_streams):
        streams.append(Stream(seed, num_tokens, cluster.key_of(seed)))
        await loop.create_connection(lambda: streams[-1], "127.0.0.1", cluster.port)
        await asyncio.sleep(1 / RAMP_STREAMS_PER_SECOND)
    start, before = time.perf_counter(), cluster.cpu_seconds()
    await asyncio.wait([stream.ended for stream in streams], return_when=asyncio.FIRST_COMPLETED)
    end, after = time.perf_counter(), cluster.cpu_seconds()
    # One that never ends is lost.
    await asyncio.wait([stream.ended for stream in streams], timeout=END_TIMEOUT_SECONDS)
    return streams, start, end, {name: after[name] - before[name] for name in after}


def _evaluate(
    result: Result,
    streams: Sequence[Stream],
    stamps: dict[str, list[float]],
    vocab_size: int,
    start: float,
    end: float,
) -> tuple[list[float], list[float]]:
    """Counts losses, and the chunks that came between `start` and `end`, into `result`; returns the delays (ms) of
    these chunks' tokens, and what was added to the time to each stream's first token."""
    late: list[float] = []
    first: list[float] = []
    for stream in streams:
        arrivals, events = [], []
        has_ended = False
        for at, data in stream.events():
            if data == b"[DONE]":
                has_ended = True
            elif data:
                arrivals.append(at)
                events.append(json.loads(data))
        if not has_ended or "choices" not in events[-1] or not stream.is_whole(vocab_size, events):
            result.num_lost += 1
            continue
        came_at, *published = stamps[events[0]["id"]]
        first.append(1e3 * (came_at - stream.sent_at + arrivals[0] - published[0]))
        for at, event in zip(arrivals, events, strict=True):
            num_tokens = len(event["choices"][0]["token_ids"])
            if start <= at <= end:
                result.num_chunks += 1
                late += [1e3 * (at - one) for one in published[:num_tokens]]
            del published[:num_tokens]
    return late, first


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    if len(values) < 2:
        return {"p50": float("nan"), "p99": float("nan"), "max": float("nan")}
    cuts = statistics.quantiles(values, n=100)
    return {"p50": cuts[49], "p99": cuts[98], "max": max(values)}


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process with its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.streams", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument(
        "--streams", type=lambda text: [int(part) for part in text.split(",")], default=[100, 300, 1000]
    )
    parser.add_argument("--targets", type=int, default=2, help="simulated target workers")
    parser.add_argument("--viewers", type=int, default=0, help="that watch the router's page meanwhile")
    parser.add_argument("--keys", type=int, default=0, help="API keys that the streams use in turn")
    parser.add_argument("--seconds", type=float, default=20.0, help="that all streams run")
    parser.add_argument("--out", type=Path, default=Path("bench/results/streams.json"))
    return parser


if __name__ == "__main__":
    main()
