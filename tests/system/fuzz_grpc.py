"""Fuzzer of gRPC: peers that break the protocol on purpose.

    python -m tests.system.fuzz_grpc --seconds 600
    python -m tests.system.fuzz_grpc --minutes 10 --role server

With the role `client` they call the ports of the target and the draft. With the role `server` they are workers: drafts
that a target calls, and a target next to it that the router calls.

Meanwhile a client that behaves asks the router for the same stream repeatedly. None of its tokens may change, no
program may end, and no answer may report an internal failure. At the end memory, files and blocks are what they were.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from cluster.speculation.params import SamplingParams
from cluster.wire.codec import encode_sampling
from protos.speculation.v1 import draft_pb2, target_pb2, types_pb2
from services.launch.local import LocalCluster
from tests.system.conftest import READY_TIMEOUT_SECONDS, cluster_config
from tests.system.fuzzing import Figures, Resources, assert_nothing_kept, fuzz, programs, run_for_long
from tests.system.hostile_servers import HostileDraft, HostileTarget
from tests.system.open_cluster import Client, OpenCluster
from tests.system.spoiling import STRINGS, Spoiler

SETTINGS = ("speculation.max_run_ahead=34", "target.kv_cache_bytes=67108864")
_SPECULATE = "/speculation.v1.Draft/Speculate"
_GENERATE = "/speculation.v1.Target/GenerateMany"
_UNARY: dict[str, tuple[tuple[str, type[Message]], ...]] = {
    "target": (
        ("/speculation.v1.Target/Describe", types_pb2.DescribeRequest),
        ("/speculation.v1.Target/LoadAdapter", target_pb2.LoadAdapterRequest),
        ("/speculation.v1.Target/UnloadAdapter", target_pb2.UnloadAdapterRequest),
        ("/grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest),
        ("/grpc.health.v1.Health/Watch", health_pb2.HealthCheckRequest),
    ),
    "draft": (
        ("/speculation.v1.Draft/Describe", types_pb2.DescribeRequest),
        ("/grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest),
        ("/grpc.health.v1.Health/Watch", health_pb2.HealthCheckRequest),
        ("/speculation.v1.Draft/Nothing", types_pb2.DescribeRequest),
    ),
}
NUM_HOSTILE_DRAFTS = 6
_BROKEN = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS)
_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
)
_MEMORY_BYTES = (
    512 * 2**20
)  # that a program may grow by: a message of 16 MiB takes many times that as Python's integers


class Attacker:
    """One connection at a time."""

    def __init__(self, target: str, draft: str, seed: int, figures: Figures) -> None:
        self._addresses = {"target": target, "draft": draft}
        self._random = random.Random(seed)
        self._spoiler = Spoiler(self._random)
        self._figures = figures
        self.ways: tuple[Callable[[], None], ...] = (
            self.speculates,
            self.speculates,
            self.generates,
            self.generates,
            self.asks,
            self.sends_no_message,
            self.sends_too_much,
            self.floods,
            self.many_streams,
            self.speaks_no_grpc,
        )

    def attack(self) -> None:
        way = self._random.choice(self.ways)
        way()
        self._figures.did[way.__name__] += 1

    def speculates(self) -> None:
        self._converse(_SPECULATE, self._bytes_of(self._session(self._draft_messages())))

    def generates(self) -> None:
        self._converse(_GENERATE, self._bytes_of(self._session(self._target_messages())))

    def asks(self) -> None:
        """Methods with one request."""
        pool = self._random.choice(("target", "draft"))
        method, kind = self._random.choice(_UNARY[pool])
        message = kind()
        self._spoiler.spoil(message)
        self._ask(pool, method, message.SerializeToString())

    def sends_no_message(self) -> None:
        pool = self._random.choice(("target", "draft"))
        stream, messages = (
            (_GENERATE, self._target_messages()) if pool == "target" else (_SPECULATE, self._draft_messages())
        )
        data = [self._spoiler.mutated(message.SerializeToString()) for message in messages]
        if self._random.random() < 0.6:
            self._converse(stream, data)
        else:
            self._ask(pool, self._random.choice(_UNARY[pool])[0], self._spoiler.mutated(data[0]))

    def sends_too_much(self) -> None:
        """More than a message may have, or nearly as much, of tokens, entries or shapes."""
        if self._random.random() < 0.2:
            self._converse(self._random.choice((_GENERATE, _SPECULATE)), [bytes(20 * 2**20)])
            return
        number = self._random.choice((10_000, 200_000, 1_000_000))
        one: Message
        if self._random.random() < 0.5:
            calls = [target_pb2.StartCall(call=self._random.choice((7, index))) for index in range(number // 10)]
            request = self._request()
            request.prompt_token_ids.extend([1] * number)
            request.constraints.allowed_token_ids.extend([2] * number)
            one = self._random.choice(
                (
                    target_pb2.GenerateCommands(start=calls),
                    target_pb2.GenerateCommands(start=[target_pb2.StartCall(call=1, request=request)]),
                    target_pb2.GenerateCommands(cancel=range(number)),
                )
            )
            self._converse(_GENERATE, [one.SerializeToString()])
            return
        shape = draft_pb2.Shape(
            parents=self._random.choice(([0] * number, range(number), [self._random.randrange(99)]))
        )
        opens = [self._open(index, shape=1) for index in range(number // 50)]
        one = self._random.choice(
            (
                draft_pb2.SpeculateRequest(open=[self._open(1, shape=1)], shapes=[shape]),
                draft_pb2.SpeculateRequest(open=[self._open(1, token_ids=[1] * number)]),
                draft_pb2.SpeculateRequest(open=opens, shapes=[draft_pb2.Shape(parents=[0])]),
                draft_pb2.SpeculateRequest(shapes=[draft_pb2.Shape()] * number),
                draft_pb2.SpeculateRequest(close=range(number)),
                draft_pb2.SpeculateRequest(
                    open=[self._open(1)],
                    advance=draft_pb2.Advance(
                        sequences=[1], bases=[1], lengths=[number], token_ids=[3] * number, num_speculative_tokens=[4]
                    ),
                ),
            )
        )
        self._converse(_SPECULATE, [one.SerializeToString()])

    def floods(self) -> None:
        """Sends many messages without reading the answers."""
        number = self._random.choice((100, 2_000))
        if self._random.random() < 0.5:
            message: Message = target_pb2.GenerateCommands(
                start=[target_pb2.StartCall(call=call, request=self._request()) for call in range(3)], cancel=[0, 1, 2]
            )
            self._converse(_GENERATE, [message.SerializeToString()] * number, num_reads=0)
        else:
            message = self._random.choice(self._draft_messages())
            self._converse(_SPECULATE, [message.SerializeToString()] * number, num_reads=0)

    def many_streams(self) -> None:
        pool, method = self._random.choice((("target", _GENERATE), ("draft", _SPECULATE)))
        with grpc.insecure_channel(self._addresses[pool], _OPTIONS) as channel:
            open_stream = channel.stream_stream(method)
            calls = [open_stream(iter(()), timeout=1) for _ in range(self._random.choice((10, 300)))]
            for call in calls[: self._random.randrange(len(calls))]:
                call.cancel()

    def speaks_no_grpc(self) -> None:
        host, _, port = self._addresses[self._random.choice(("target", "draft"))].rpartition(":")
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" if self._random.random() < 0.7 else b""
        settings = b"\0\0\0\4\0\0\0\0\0"
        with socket.socket() as connection, contextlib.suppress(OSError):
            connection.settimeout(2)
            connection.connect((host, int(port)))
            connection.sendall(preface + settings * self._random.choice((0, 1, 5000)))
            connection.sendall(self._random.randbytes(self._random.choice((0, 9, 1000, 100_000))))
            time.sleep(self._random.choice((0.0, 0.0, 1.0)))
            if self._random.random() < 0.5:  # with a reset
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    def _ask(self, pool: str, method: str, data: bytes) -> None:
        with grpc.insecure_channel(self._addresses[pool], _OPTIONS) as channel:
            # Of one answer or of many: the caller's side is the same.
            self._read(channel.unary_stream(method)(data, timeout=0.5), method, 1)

    def _converse(self, method: str, messages: Sequence[bytes], num_reads: int | None = None) -> None:
        """Sends `messages` on a stream, reads some answers, and leaves it in one way or another."""
        done = threading.Event()
        is_half_closed = self._random.random() < 0.3

        def requests() -> Iterator[bytes]:
            yield from messages
            if not is_half_closed:
                done.wait(3.0)

        pool = "target" if method == _GENERATE else "draft"
        channel = grpc.insecure_channel(self._addresses[pool], _OPTIONS)
        call = channel.stream_stream(method)(requests(), timeout=self._random.choice((0.02, 0.3, 2.0)))
        if num_reads is None:
            num_reads = self._random.choice((0, 1, 10, 1000))
        self._read(call, method, num_reads)
        if self._random.random() < 0.5:
            call.cancel()
        done.set()
        channel.close()

    def _read(self, call: Any, method: str, number: int) -> None:
        """Some answers, and how the call ended."""
        try:
            for _, answer in zip(range(number), call, strict=False):
                if method == _GENERATE:
                    self._note_errors(target_pb2.GenerateReplies.FromString(answer))
            self._figures.answers["answered"] += 1
        except grpc.RpcError as error:
            status: grpc.StatusCode = error.code()  # type: ignore[attr-defined]  # a call
            self._figures.answers[status.name] += 1
            if status in _BROKEN:
                self._figures.failures.append(f"{method}: {status.name}: {error.details()}")  # type: ignore[attr-defined]

    def _note_errors(self, replies: target_pb2.GenerateReplies) -> None:
        for error in replies.errors:
            self._figures.answers[f"call: {error.code}"] += 1
            if error.code in {status.value[0] for status in _BROKEN}:
                self._figures.failures.append(f"a call: {error.message}")

    def _session(self, messages: list[Message]) -> list[Message]:
        """`messages` as they are, or in disorder, or with values that nobody should send."""
        if self._random.random() < 0.3:
            self._random.shuffle(messages)
        if self._random.random() < 0.3:
            messages += self._random.choices(messages, k=3)
        for _ in range(self._random.choice((0, 1, 1, 3))):
            self._spoiler.spoil(self._random.choice(messages))
        return messages

    @staticmethod
    def _bytes_of(messages: Sequence[Message]) -> list[bytes]:
        return [message.SerializeToString() for message in messages]

    def _sampling(self) -> types_pb2.SamplingParams:
        params = SamplingParams(
            temperature=self._random.choice((0.0, 0.7, 1.0, 1.9, 5.5, 1e-4, 1e300)),
            top_k=self._random.choice((0, 0, 3, 2**32 - 1)),
            top_p=self._random.choice((1.0, 1.0, 0.9, 1e-300)),
            min_p=self._random.choice((0.0, 0.0, 1.0)),
            repetition_penalty=self._random.choice((1.0, 1.0, 1.2, 1e-300, 1e300)),
            frequency_penalty=self._random.choice((0.0, 0.0, 2.0, -1e300)),
            logit_bias=self._random.choice(((), (), ((5, 3.0),), ((5, 1e300), (5, -1e300)), ((2**32 - 1, 1.0),))),
        )
        return encode_sampling(params)

    def _tokens(self, number: int) -> list[int]:
        return [self._random.randrange(256) for _ in range(number)]

    def _open(self, sequence: int, **fields: Any) -> draft_pb2.Open:
        k = self._random.choice((0, 1, 4, 16, 64, 2**32 - 1))
        values = {
            "token_ids": self._tokens(self._random.choice((1, 5, 40, 300))),
            "num_prompt_tokens": 1,
            "sampling": self._sampling(),
            "num_speculative_tokens": k,
            "window": self._random.choice((0, 2 * min(k, 64) + 2, 2**32 - 1)),
        }
        return draft_pb2.Open(sequence=sequence, **(values | fields))

    def _shape(self) -> draft_pb2.Shape:
        number = self._random.choice((0, 1, 8, 64, 2_000))
        random_tree = [self._random.randrange(node + 1) for node in range(number)]
        bad = [self._random.choice((0, 1, 2**32 - 1)) for _ in range(number)]
        parents = self._random.choice((random_tree, random_tree, range(number), [0] * number, random_tree[::-1], bad))
        return draft_pb2.Shape(parents=parents)

    def _draft_messages(self) -> list[Message]:
        """A session as a coordinator might have it, k, windows and shapes apart."""
        shapes = [self._shape() for _ in range(2)]
        opens = [
            self._open(sequence, shape=self._random.randrange(3)) for sequence in range(self._random.choice((1, 4)))
        ]
        messages: list[Message] = [draft_pb2.SpeculateRequest(open=opens, shapes=shapes)]
        lengths = [len(entry.token_ids) for entry in opens]
        for _ in range(self._random.choice((1, 5, 30))):
            news = [self._tokens(self._random.choice((1, 3, 70))) for _ in opens]
            advance = draft_pb2.Advance(
                sequences=range(len(opens)),
                bases=lengths,
                lengths=[len(tokens) for tokens in news],
                token_ids=[token for tokens in news for token in tokens],
                num_speculative_tokens=[self._random.choice((1, 4, 2**32 - 1)) for _ in opens],
                shapes=[self._random.randrange(3) for _ in opens],
            )
            lengths = [length + len(tokens) for length, tokens in zip(lengths, news, strict=True)]
            messages.append(draft_pb2.SpeculateRequest(advance=advance, shapes=shapes))
        messages.append(draft_pb2.SpeculateRequest(close=range(len(opens) + 1)))
        return messages

    def _request(self) -> target_pb2.GenerateRequest:
        request = target_pb2.GenerateRequest(
            request_id=self._random.choice(("one", *STRINGS)),
            prompt_token_ids=self._tokens(self._random.choice((0, 1, 5, 300))),
            num_generated_tokens=self._random.choice((0, 0, 2, 2**32 - 1)),
            sampling=self._sampling(),
            seed=self._random.choice((0, -(2**63), 2**63 - 1)),
            choice_index=self._random.choice((0, 2**32 - 1)),
            max_tokens=self._random.choice((0, 1, 8, 64, 2**32 - 1)),
            ignore_eos=True,
            num_speculative_tokens=self._random.choice((None, 0, 4, 17, 2**32 - 1)),
            num_logprobs=self._random.choice((None, None, 0, 20, 2**32 - 1)),
            num_prompt_logprobs=self._random.choice((None, None, 5, 2**32 - 1)),
            stop_token_ids=self._random.choice(((), (), (2**32 - 1,), range(256))),
            adapter=self._random.choice(("", "", "", "none", "\0")),
        )
        if self._random.random() < 0.4:
            self._spoiler.spoil(request.constraints)
        if self._random.random() < 0.2:
            forms = (
                target_pb2.Grammar(json_schema=self._random.choice(('{"type": "integer"}', *STRINGS))),
                target_pb2.Grammar(regex=self._random.choice(("[0-9]+", *STRINGS))),
                target_pb2.Grammar(ebnf=self._random.choice(('root ::= "x"', *STRINGS))),
                target_pb2.Grammar(structural_tag=self._random.choice(STRINGS)),
            )
            request.constraints.grammar.CopyFrom(self._random.choice(forms))
        return request

    def _target_messages(self) -> list[Message]:
        """A session as a router might have it, values apart; and calls that are started twice, or were never."""
        calls = [self._random.choice((1, 2, index, 2**64 - 1)) for index in range(self._random.choice((1, 3, 10)))]
        messages: list[Message] = [
            target_pb2.GenerateCommands(start=[target_pb2.StartCall(call=call, request=self._request())])
            for call in calls
        ]
        messages.append(target_pb2.GenerateCommands(cancel=[*calls[:2], 99]))
        return messages


def fuzz_workers(cluster: LocalCluster, seconds: float, *, seed: int, concurrency: int = 6) -> Figures:
    """Attacks the first target and the first draft of `cluster` for `seconds`. The figures include all failures."""
    figures = Figures()
    target, draft = cluster.config.target.addresses[0], cluster.config.draft.addresses[0]
    attackers = [Attacker(target, draft, seed * 1000 + number, figures) for number in range(concurrency)]
    fuzz(cluster.url, seconds, figures, [attacker.attack for attacker in attackers])
    return figures


def run(seconds: float, seed: int, *overrides: str) -> tuple[Figures, str]:
    """Starts a cluster, attacks it, and checks what is left. Returns the figures, and the workers' resources."""
    with LocalCluster(cluster_config(*SETTINGS, *overrides)) as cluster:
        cluster.wait_ready(READY_TIMEOUT_SECONDS)
        fuzz_workers(cluster, 1, seed=seed + 1)  # what is started with the first that needs it
        before, pids = {child: Resources.of(child) for child in programs(cluster)}, [c.pid for c in programs(cluster)]
        figures = fuzz_workers(cluster, seconds, seed=seed)
        resources = "\n".join(
            f"{child.name}: before {held}, after {Resources.of(child)}" for child, held in before.items()
        )
        try:
            assert_nothing_kept(cluster, before, pids, _MEMORY_BYTES)
        except AssertionError as error:
            figures.failures.append(str(error))
        return figures, resources


def run_servers(seconds: float, seed: int, *overrides: str) -> tuple[Figures, str]:
    """Starts a cluster, lets hostile workers join it, and checks every answer. Returns the same as `run`."""
    figures = Figures()
    with contextlib.ExitStack() as stack:
        settings = (*SETTINGS, "speculation.controller=fixed")  # another one would soon ask these drafts for nothing
        cluster = stack.enter_context(OpenCluster(cluster_config(*settings, *overrides)))
        cluster.wait_ready(READY_TIMEOUT_SECONDS)
        client = stack.enter_context(contextlib.closing(Client(cluster.url, figures)))
        client.learn()
        (target,), (draft,) = cluster.config.target.addresses, cluster.config.draft.addresses
        servers = stack.enter_context(contextlib.ExitStack())
        drafts = [
            servers.enter_context(HostileDraft(draft, seed * 100 + n, figures)) for n in range(NUM_HOSTILE_DRAFTS)
        ]
        hostile = [servers.enter_context(HostileTarget(target, seed * 100 + 50 + n, figures)) for n in range(2)]
        before, pids = {child: Resources.of(child) for child in programs(cluster)}, [c.pid for c in programs(cluster)]
        turns = itertools.count()

        def change_workers() -> None:
            """Lists one hostile target and half of the hostile drafts: new ones are called without a pause."""
            turn = next(turns)
            half = [server.address for server in drafts[turn % 2 :: 2]]
            cluster.list_workers(targets=[target, hostile[turn % 2].address], drafts=half)
            time.sleep(2.0)

        asks = [functools.partial(client.ask, random.Random(seed * 100 + number)) for number in range(3)]
        victims = [functools.partial(client.ask_as_victim, random.Random(-seed * 100 - number)) for number in range(3)]
        fuzz(cluster.url, seconds, figures, [change_workers, *asks, *victims])
        client.close()
        cluster.list_workers(targets=[target], drafts=[draft])
        servers.close()
        resources = "\n".join(
            f"{child.name}: before {held}, after {Resources.of(child)}" for child, held in before.items()
        )
        try:
            assert_nothing_kept(cluster, before, pids, _MEMORY_BYTES)
            for child, held in before.items():
                grown = Resources.of(child).num_peak_bytes - held.num_peak_bytes
                assert grown <= _MEMORY_BYTES, f"the {child.name} had grown by {grown} bytes"
        except AssertionError as error:
            figures.failures.append(str(error))
        return figures, f"{resources}\nslowest answer: {client.slowest_seconds:.1f} s"


def run_as(seconds: float, seed: int, *overrides: str, role: str) -> tuple[Figures, str]:
    return (run_servers if role == "server" else run)(seconds, seed, *overrides)


if __name__ == "__main__":
    raise SystemExit(run_for_long(__doc__, run_as, ["client", "server"]))
