"""Common parts of fuzzers of a running cluster: a client that behaves, and checks after the end."""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from services.launch.child import Child
from services.launch.local import LocalCluster
from tests.system.client import assert_nothing_in_use
from tests.waiting import WAIT_S, eventually

_STEADY = {"prompt": "def main(", "max_tokens": 48, "seed": 7, "ignore_eos": True, "return_token_ids": True}
_STEADY_SECONDS = WAIT_S
_END_SECONDS = WAIT_S


@dataclass
class Figures:
    did: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)  # what the attacks got; "" where none was seen
    num_steady: int = 0
    num_stuck: int = 0  # attackers that did not end
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.did.total()} attacks {dict(sorted(self.did.items()))}\n"
            f"answers {dict(sorted(self.answers.items()))}, {self.num_steady} steady streams, "
            f"{self.num_stuck} attackers stuck"
        )


def steady_tokens(client: httpx.Client) -> list[int]:
    """Returns the tokens of the stream that must not change."""
    token_ids: list[int] = []
    # A kept connection may be closed as idle just when it is used again, so each request has its own.
    headers = {"connection": "close"}
    with client.stream("POST", "/v1/completions", json=_STEADY | {"stream": True}, headers=headers) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                token_ids += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
    return token_ids


def fuzz(url: str, seconds: float, figures: Figures, attacks: Sequence[Callable[[], None]]) -> None:
    """Repeats each of `attacks` for `seconds` in a thread of its own, while steady streams run at the router."""
    deadline = time.monotonic() + seconds

    def repeat(attack: Callable[[], None]) -> None:
        try:
            while time.monotonic() < deadline:
                attack()
        except Exception as error:
            figures.failures.append(f"an attack cannot go on: {type(error).__name__}: {error}")

    with httpx.Client(base_url=url, timeout=_STEADY_SECONDS, trust_env=False) as client:
        expected = steady_tokens(client)
        # Not waited for without end: gRPC's client was once seen to wait for ever to close a channel of its own.
        threads = [threading.Thread(target=repeat, args=(attack,), daemon=True) for attack in attacks]
        for thread in threads:
            thread.start()
        while time.monotonic() < deadline:
            try:
                if (token_ids := steady_tokens(client)) != expected:
                    figures.failures.append(f"the tokens of the steady stream are {token_ids}, not {expected}")
            except (httpx.HTTPError, ValueError, KeyError) as error:
                figures.failures.append(f"the steady stream: {type(error).__name__}: {error}")
            figures.num_steady += 1
        for thread in threads:
            thread.join(_END_SECONDS)
        figures.num_stuck = sum(thread.is_alive() for thread in threads)


@dataclass(frozen=True)
class Resources:
    """Resources that a process holds."""

    num_files: int
    num_bytes: int
    num_peak_bytes: int  # the most since the process began

    @classmethod
    def of(cls, child: Child) -> Resources:
        process = Path(f"/proc/{child.pid}")
        pages = int((process / "statm").read_text().split()[1])
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        peak = 1024 * int(status["VmHWM"].split()[0])
        return cls(len(list((process / "fd").iterdir())), pages * 4096, peak)


def assert_nothing_kept(
    cluster: LocalCluster, before: Mapping[Child, Resources], pids: Sequence[int], memory_bytes: int
) -> None:
    """Every program is the one of before, and those of `before` hold what they held, and `memory_bytes` at most more:
    pools of threads, arenas."""
    assert_nothing_in_use(cluster)
    assert [child.pid for child in programs(cluster)] == pids, "a program has ended"

    def is_idle() -> bool:
        page = httpx.get(f"{cluster.url}/metrics", trust_env=False).text.splitlines()
        running = [line for line in page if line.startswith("vllm:num_requests_running")]
        connections = [line for line in page if line.startswith("outrider_http_connections ")]
        return running[0].endswith(" 0.0") and connections == ["outrider_http_connections 1.0"]  # that of this call

    assert eventually(is_idle), "requests or connections are left"
    for child, held in before.items():
        assert eventually(lambda child=child, held=held: Resources.of(child).num_files <= held.num_files + 4), (
            f"the {child.name} had {held} and has {Resources.of(child)}"
        )
        grown = Resources.of(child).num_bytes - held.num_bytes
        assert grown <= memory_bytes, f"the {child.name} has grown by {grown} bytes"


def programs(cluster: LocalCluster) -> list[Child]:
    return [cluster.router, *cluster.targets, *cluster.drafts]


def run_for_long(description: str | None, run: Callable[..., tuple[Figures, str]], roles: Sequence[str] = ()) -> int:
    """The command line of a fuzzer: `run(seconds, seed, *overrides)`, with `role` if there are `roles`.

    Returns the exit code.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--minutes", dest="seconds", type=lambda minutes: 60.0 * float(minutes), metavar="MINUTES")
    parser.add_argument("--seed", type=int, default=None, help="of what is sent; default: the time")
    if roles:
        parser.add_argument("--role", choices=roles, default=roles[0], help="what is played; default: %(default)s")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    arguments = parser.parse_args()
    seed = int(time.time()) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    role = {"role": arguments.role} if roles else {}
    figures, resources = run(arguments.seconds, seed, *arguments.overrides, **role)
    print(*figures.failures[:50], figures, resources, sep="\n")
    return 1 if figures.failures else 0
