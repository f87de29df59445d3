"""Requests that nobody would write, made from the OpenAPI document, against a running cluster.

    python -m tests.system.fuzz_api --minutes 10

Schemathesis makes bodies that the document allows and such as it does not. Most are laid over a request that works, as
what is refused at its first field says nothing of the others. Every answer has to be what the document says.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import queue
import random
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import schemathesis
from hypothesis import HealthCheck, Phase, strategies
from jsonschema import Draft202012Validator

from services.launch.child import Child
from services.launch.local import LocalCluster
from tests.system.client import assert_nothing_in_use
from tests.system.conftest import READY_TIMEOUT_SECONDS, cluster_config
from tests.system.fuzzing import programs
from tests.waiting import WAIT_S, eventually

# What a fuzzer makes big without need: a cluster on two cores has to answer some thousand requests.
_SMALL = {"max_tokens": 12, "max_completion_tokens": 12, "max_output_tokens": 12, "n": 3, "min_tokens": 12}
_BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "def main(", "max_tokens": 8},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi <|im_end|>"}], "max_tokens": 8},
    "/v1/responses": {"input": "hi", "max_output_tokens": 8},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/tokenize": {"prompt": "def main("},
    "/v1/tokenize": {"prompt": "def main("},
    "/detokenize": {"tokens": [5, 6, 7]},
    "/v1/detokenize": {"tokens": [5, 6, 7]},
}
_GRAMMARS: tuple[Any, ...] = (
    *({"regex": regex} for regex in ("[a-z]+", "(a|b)*c", "((((a*)*)*)*)*b", "(", "\\", ".{0,50}", "a{3}", "(?=a)")),
    *({"json": schema} for schema in ({"type": "object"}, {"enum": ["a", 1, None]}, {"allOf": 5}, {"$ref": "#"}, {})),
    *({"choice": choice} for choice in (["yes", "no"], ['\0\n"'], [""], [5])),
    *({"grammar": rules} for rules in ('root ::= "a" root | "b"', 'root ::= root "a" | "a"', "root ::= root", "x", "")),
    *({"structural_tag": tag} for tag in ("{}", {"type": "structural_tag", "format": {"type": "any_text"}}, 5)),
    {"json_object": True},
    {},
)
_HEADERS = strategies.dictionaries(
    strategies.sampled_from(
        ["x-request-id", "x-client-request-id", "traceparent", "tracestate", "accept", "content-encoding", "origin"]
    ),
    strategies.binary(max_size=40).map(lambda value: bytes(b for b in value if b >= 32 and b != 127).strip()),
    max_size=2,
)
_SECONDS_AT_MOST = 60.0


@dataclass(frozen=True)
class Call:
    method: str
    path: str  # as the document has it
    url: str
    content: bytes | None
    headers: Mapping[str, Any]
    leaves_early: bool  # after the first event of a stream


@dataclass
class Figures:
    codes: Counter[tuple[str, int]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    num_streams: int = 0
    num_left_early: int = 0
    slowest: float = 0.0

    def __str__(self) -> str:
        codes: Counter[int] = Counter()
        for (_, code), count in self.codes.items():
            codes[code] += count
        by_path = "\n".join(f"  {path:28} {code} {count}" for (path, code), count in sorted(self.codes.items()))
        return (
            f"{codes.total()} requests, {self.num_streams} streams ({self.num_left_early} left early), "
            f"codes {dict(sorted(codes.items()))}, slowest {self.slowest:.1f} s\n{by_path}"
        )


class Calls:
    """Makes calls from the document, in a thread of its own, until it is closed."""

    def __init__(self, document: dict[str, Any], seed: int) -> None:
        taking_bodies = {path for path, item in document["paths"].items() if "requestBody" in item.get("post", {})}
        assert taking_bodies == _BASES.keys(), "each path that takes a body needs a request that works"
        self._schema = schemathesis.openapi.from_dict(document)
        self._made: queue.Queue[Call] = queue.Queue(64)
        self._seed = seed
        self._random = random.Random(seed)
        self._is_closed = False
        self._thread = threading.Thread(target=self._make, daemon=True)
        self._thread.start()

    def take(self) -> Call:
        while True:
            try:
                return self._made.get(timeout=WAIT_S)
            except queue.Empty:
                assert self._thread.is_alive(), "no more calls are made"

    def close(self) -> None:
        self._is_closed = True
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):  # it may wait for room
                self._made.get(timeout=0.1)

    def _make(self) -> None:
        warnings.simplefilter("ignore")
        operations = [result.ok() for result in self._schema.get_all_operations()]
        positive, negative = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
        weights = [8 if operation.body else 1 for operation in operations]
        ways = {
            (operation.method, operation.path): [
                operation.as_strategy(generation_mode=positive),
                *([operation.as_strategy(generation_mode=negative)] if operation.body else []),
            ]
            for operation in operations
        }
        for number in itertools.count():
            if self._is_closed:
                return
            (operation,) = self._random.choices(operations, weights)
            strategy = self._random.choice(ways[operation.method, operation.path])
            self._draw(strategy, self._seed + number)

    def _draw(self, strategy: Any, seed: int) -> None:
        """Draws twenty calls at a time, because a new start takes as long as several draws."""

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=20,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @hypothesis.given(case=strategy, headers=_HEADERS)
        def put(case: Any, headers: dict[str, bytes]) -> None:
            if not self._is_closed:
                self._made.put(self._call(case, headers))

        put()

    def _call(self, case: Any, headers: dict[str, bytes]) -> Call:
        content = None
        sent: dict[str, Any] = dict(headers)
        if case.operation.body:
            body = case.body
            if isinstance(body, dict) and self._random.random() < 0.75:
                body = self._laid_over(_BASES[case.operation.path], body)
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            sent["content-type"] = "application/json" if self._random.random() < 0.98 else "text/plain"
        return Call(
            case.operation.method.upper(),
            case.operation.path,
            case.formatted_path,
            content,
            sent,
            leaves_early=self._random.random() < 0.2,
        )

    def _laid_over(self, base: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
        """A request that works, with some of the fields of `body`, few of them most often."""
        fields = [name for name in body if name not in base]
        self._random.shuffle(fields)
        chosen = fields[: self._random.choice((1, 2, 3, len(fields)))]
        laid = base | {name: body[name] for name in chosen}
        for name, most in _SMALL.items():
            if isinstance(laid.get(name), int) and abs(laid[name]) > most and self._random.random() < 0.9:
                laid[name] = self._random.randint(0, most)
        if "prompt" in base and self._random.random() < 0.3:
            laid |= {"stream": True}
        if base.keys() & {"messages", "input"} and self._random.random() < 0.5:
            laid |= {"stream": True}
        if "tokens" not in base and self._random.random() < 0.25:
            laid["structured_outputs"] = self._random.choice(_GRAMMARS)
        return laid


class Judge:
    """Tells what is wrong with an answer."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._validators: dict[str, Draft202012Validator] = {}

    def complaints(self, call: Call, status: int, headers: httpx.Headers, text: str) -> Iterator[str]:
        responses = self._document["paths"][call.path][call.method.lower()]["responses"]
        if status == 500 or str(status) not in responses:
            yield f"the status {status} is not one for this route"
            return
        if status in (429, 503) and not headers.get("retry-after", "").isdecimal():
            yield f"{status} without retry-after"
        contents = responses[str(status)].get("content", {})
        media_type = headers.get("content-type", "").partition(";")[0]
        if not contents:
            return
        if media_type not in contents:
            yield f"the type {media_type} is not among {list(contents)}"
        elif media_type == "text/event-stream":
            yield from self._stream_complaints(call, contents[media_type]["schema"], text)
        elif media_type == "application/json" and "schema" in contents[media_type]:
            yield from self._mismatches(contents[media_type]["schema"], json.loads(text))

    def _stream_complaints(self, call: Call, schema: dict[str, Any], text: str) -> Iterator[str]:
        events = [
            line.removeprefix("data: ")
            for block in text.replace("\r\n", "\n").split("\n\n")
            for line in block.split("\n")
            if line.startswith("data: ")
        ]
        if not events:
            yield "a stream without events"
            return
        decoded = [json.loads(event) for event in events if event != "[DONE]"]
        failed = [event for event in decoded if "error" in event and "type" not in event]
        for event in decoded:
            yield from self._mismatches({"$ref": "#/components/schemas/Error"} if event in failed else schema, event)
        if call.leaves_early or failed == decoded[-1:]:
            return
        if call.path == "/v1/responses":
            kinds = ("response.completed", "response.incomplete", "response.failed")
            if decoded[-1]["type"] not in kinds:
                yield f"a stream that ends with {decoded[-1]['type']}"
        elif call.path == "/v1/messages":
            if decoded[-1]["type"] not in ("message_stop", "error"):
                yield f"a stream that ends with {decoded[-1]['type']}"
        elif events[-1] != "[DONE]":
            yield f"a stream that ends with {events[-1][:80]}"

    def _mismatches(self, schema: dict[str, Any], value: Any) -> Iterator[str]:
        key = json.dumps(schema)
        if key not in self._validators:
            self._validators[key] = Draft202012Validator(schema | {"components": self._document["components"]})
        for error in itertools.islice(self._validators[key].iter_errors(value), 3):
            yield f"at {error.json_path}: {error.message[:200]}"


def fuzz(url: str, seconds: float, *, seed: int, concurrency: int = 6) -> Figures:
    """Calls the router at `url` for `seconds`. The figures include all failures."""
    figures, lock = Figures(), threading.Lock()
    with httpx.Client(base_url=url, timeout=_SECONDS_AT_MOST, trust_env=False) as client:
        document = client.get("/openapi.json").json()
    judge, calls = Judge(document), Calls(document, seed)
    deadline = time.monotonic() + seconds

    def call_on() -> None:
        with httpx.Client(base_url=url, timeout=_SECONDS_AT_MOST, trust_env=False) as client:
            while time.monotonic() < deadline:
                call = calls.take()
                began_at = time.monotonic()
                try:
                    status, headers, text = _send(client, call)
                    complaints = list(judge.complaints(call, status, headers, text))
                except (httpx.HTTPError, ValueError, KeyError) as error:
                    status, text, complaints = 0, "", [f"{type(error).__name__}: {error}"]
                    headers = httpx.Headers()
                with lock:
                    figures.codes[call.path, status] += 1
                    figures.slowest = max(figures.slowest, time.monotonic() - began_at)
                    if headers.get("content-type", "").startswith("text/event-stream"):
                        figures.num_streams += 1
                        figures.num_left_early += call.leaves_early
                    if complaints:
                        sent = (call.content or b"")[:2000].decode(errors="replace")
                        asked = f"{call.method} {call.url} {dict(call.headers)}"
                        figures.failures.append("\n    ".join((asked, sent, f"{status} {text[:300]}", *complaints)))

    with ThreadPoolExecutor(concurrency) as threads:
        for future in [threads.submit(call_on) for _ in range(concurrency)]:
            future.result()
    calls.close()
    return figures


def _send(client: httpx.Client, call: Call) -> tuple[int, httpx.Headers, str]:
    with client.stream(call.method, call.url, content=call.content, headers=call.headers) as response:
        if call.leaves_early and response.headers.get("content-type", "").startswith("text/event-stream"):
            first = b""
            for piece in response.iter_raw():
                first += piece
                if b"\n\n" in first:
                    break
            return response.status_code, response.headers, first.rpartition(b"\n\n")[0].decode()
        return response.status_code, response.headers, response.read().decode()


@dataclass(frozen=True)
class Resources:
    """Resources that a process holds."""

    num_files: int
    num_threads: int

    @classmethod
    def of(cls, child: Child) -> Resources:
        process = Path(f"/proc/{child.pid}")
        return cls(len(list((process / "fd").iterdir())), len(list((process / "task").iterdir())))


def warm_up(url: str) -> None:
    """Starts what only the first requests start: the process that compiles grammars, and threads."""
    for path, base in _BASES.items():
        httpx.post(f"{url}{path}", json=base, timeout=WAIT_S, trust_env=False).raise_for_status()
    body = _BASES["/v1/completions"] | {"structured_outputs": {"regex": "a+"}}
    httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_S, trust_env=False).raise_for_status()


def assert_nothing_kept(cluster: LocalCluster, before: list[Resources]) -> None:
    """Asserts that no request, block, sequence, file or thread is left. Thread pools may have grown to their size."""
    assert_nothing_in_use(cluster)
    assert eventually(lambda: _router_is_idle(cluster.url)), "requests are in flight still"
    for child, had in zip(programs(cluster), before, strict=True):
        assert eventually(lambda child=child, had=had: Resources.of(child).num_files <= had.num_files + 4), (
            f"the {child.name} had {had} and has {Resources.of(child)}"
        )
        assert Resources.of(child).num_threads <= had.num_threads + 16, child.name


def _router_is_idle(url: str) -> bool:
    page = httpx.get(f"{url}/metrics", trust_env=False).text
    return all(
        float(line.rpartition(" ")[2]) == 0
        for line in page.splitlines()
        if line.startswith("vllm:num_requests_running")
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="of what is asked; default: the time")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    arguments = parser.parse_args()
    seed = int(time.time()) if arguments.seed is None else arguments.seed
    print(f"seed {seed}")
    with LocalCluster(cluster_config(*arguments.overrides)) as cluster:
        cluster.wait_ready(READY_TIMEOUT_SECONDS)
        warm_up(cluster.url)
        before = [Resources.of(child) for child in programs(cluster)]
        figures = fuzz(cluster.url, arguments.minutes * 60, seed=seed)
        print(*figures.failures[:50], figures, sep="\n")
        assert_nothing_kept(cluster, before)
        print("before", before, "\nafter ", [Resources.of(child) for child in programs(cluster)])
    return 1 if figures.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
